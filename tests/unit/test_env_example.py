from pathlib import Path

from verl_ext.settings import VARIABLES, Settings, example_text

EXAMPLE = Path(__file__).parents[2] / ".env.example"


def test_the_file_is_what_the_table_makes():
    assert EXAMPLE.read_text() == example_text(), "run: python -m verl_ext.settings --example > .env.example"


def test_a_copy_of_it_is_a_working_env_file(tmp_path: Path):
    copy = tmp_path / ".env"
    copy.write_text(EXAMPLE.read_text())
    assert Settings.load(copy, environ={}).public_dict() == Settings.load(environ={}).public_dict() | {
        "VERL_EXT_ENV_FILE": str(copy)
    }


def test_every_default_in_it_is_accepted_when_uncommented(tmp_path: Path):
    copy = tmp_path / ".env"
    lines = [f"{variable.name}={variable.default}" for variable in VARIABLES if variable.default]
    copy.write_text("\n".join(lines) + "\n")
    Settings.load(copy, environ={})


def test_every_variable_says_what_it_is():
    for variable in VARIABLES:
        assert variable.doc, variable.name
        assert len(variable.doc) <= 100, variable.name
        assert not (variable.secret and variable.default), variable.name
