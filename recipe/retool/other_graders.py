"""Other people's graders, unchanged, to compare ours with: verl's strict box (what ReTool trains on) and math-verify.

They are called in processes with limits, for they can hang or raise. What their libraries do with a text is theirs:
math-verify evaluates numbers with sympy's parser, so it gets a process without the user's environment.
"""

import tempfile
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from recipe.retool.symbolic.pool import KillablePool, LimitReached, Limits

Outcome = bool | str
"""Right or wrong, or the reason why the grader gave neither."""

_LIMITS = Limits(cpu_s=5.0, wall_s=20.0, memory_mib=16_384)
_MAX_CHARS = 100_000
"""What is handed on of a text, from its end."""


def strict_box(text: str, truth: str) -> bool:
    """verl's strict box: the last box within the last 100 characters, equal as text.

    Source: verl 0.6.1 utils/reward_score/math_dapo.py, as recipe/retool/retool.py of v0.6.1 calls it.
    """
    return _math_dapo().compute_score(text, truth, strict_box_verify=True)["score"] > 0


def math_verify(text: str, truth: str) -> bool:
    """math-verify with its defaults, but without its own time-outs, which need the main thread and a signal.

    Source: README of huggingface/Math-Verify, "Usage".
    """
    library = import_module("math_verify")
    gold = library.parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    return bool(library.verify(gold, library.parse(text, parsing_timeout=None), timeout_seconds=None))


def prime_math(text: str, truth: str) -> bool:
    """verl's prime_math, which runs the text of some answers as code; for benchmarks only.

    Source: verl 0.6.1 utils/reward_score/prime_math.
    """
    library = import_module("verl.utils.reward_score.prime_math")
    return bool(library.compute_score(text, truth)[0])


_loaded: dict[str, ModuleType] = {}


def _math_dapo() -> ModuleType:
    """The one file of verl's, loaded by its path: `import verl` takes 10 s and torch."""
    if "math_dapo" not in _loaded:
        verl = find_spec("verl")
        if verl is None or not verl.submodule_search_locations:
            raise ImportError("verl is not installed")
        path = Path(verl.submodule_search_locations[0], "utils", "reward_score", "math_dapo.py")
        spec = spec_from_file_location("math_dapo_of_verl", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded["math_dapo"] = module
    return _loaded["math_dapo"]


class OtherGrader:
    """One of the graders above, called with limits.

    Args:
        function: its name in this module.
        package: what it needs; without it every outcome is "not installed".
    """

    def __init__(self, function: str, package: str) -> None:
        self.installed = find_spec(package) is not None
        # An empty folder, for those that run what they read.
        self._folder = tempfile.TemporaryDirectory(prefix="grader-")
        self._pool = KillablePool(f"{__name__}:{function}", _LIMITS, size=1, folder=self._folder.name)

    def __call__(self, text: object, truth: object) -> Outcome:
        """Whether it calls the text right, or why it calls it nothing."""
        if not self.installed:
            return "not installed"
        if not isinstance(text, str) or not isinstance(truth, str):
            return "takes text only"
        try:
            return bool(self._pool.call(text[-_MAX_CHARS:], truth))
        except LimitReached as error:
            return str(error)

    def close(self) -> None:
        """End its process."""
        self._pool.close()
        self._folder.cleanup()
