"""Whether the nodes of a cluster reach each other, and how fast: `invoke check-network`.

interfaces.py   what a node calls its ways to the others, and what the variables of NCCL and gloo make of them
node.py         what runs on each node: looks, tries connections, starts and ends the node's ranks
probe.py        one rank: torch.distributed between all of them, each pair timed, then an all-reduce
nodes.py        this machine alone, or the nodes of a Ray cluster (ray_nodes.py), asked all at once with a deadline
check.py        the order of it: who answers, which interface, who reaches whom, and only then the ranks
problems.py     what went wrong, in words
report.py       tables and JSON
"""
