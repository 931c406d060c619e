import inspect
import pickle

import pytest

from verl_ext import errors

TREE = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
}


def test_the_drawing_names_every_error():
    drawn = {word for word in (errors.__doc__ or "").split() if word.endswith("Error") and word in TREE}
    assert drawn == set(TREE)


@pytest.mark.parametrize("kind", TREE.values(), ids=TREE)
def test_each_survives_pickling_with_its_message(kind: type[Exception]):
    copy = pickle.loads(pickle.dumps(kind("what is wrong: the cure")))
    assert type(copy) is kind
    assert str(copy) == "what is wrong: the cure"


def test_each_stands_for_a_standard_error():
    for kind in TREE.values():
        assert issubclass(kind, errors.VerlAgsError)
        if kind is not errors.VerlAgsError:
            assert issubclass(kind, (ValueError, RuntimeError)), kind
