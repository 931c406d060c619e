"""What a platform wants of a run, made from one source: `invoke render PLATFORM`.

facts.py        image, machines, names of variables, the command: everything that the templates may say
builtin.py      which packages a built-in image lacks, from the lock
render.py       the platforms, their templates, and the command
templates/      one file of each that is made
"""
