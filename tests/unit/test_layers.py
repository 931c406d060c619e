"""What may import what, and that the promise of light imports is kept where it counts."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "vllm", "verl", "transformers", "tensordict"}


def test_the_contracts_hold():
    if find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed here")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/bin"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-500:]


def module_level_imports(path: Path) -> set[str]:
    """Top-level packages that are imported when the file is, not those inside functions or for types."""
    found: set[str] = set()
    waiting = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return found


# What may be heavy, and why; every other file of verl_ext must be light.
HEAVY_FILES = {
    "cluster/jobs.py": "Ray's Jobs API; imported when something is asked of a cluster",
    "cluster/nodes.py": "asks a Ray cluster; imported by jobs and by a run on one",
    "advantage.py": "an estimator of verl's, on tensors",
    "cpu.py": "loaded by verl itself",
    "lost.py": "cuts verl's batches",
    "ray_run.py": "drives Ray; imported when a run starts",
    "rollout.py": "reads verl's batch",
    "trainer.py": "the seam to verl",
    "agent_loop/broker_process.py": "makes a Ray actor of the broker",
    "agent_loop/loop.py": "an agent loop of verl's",
    "agent_loop/process.py": "makes a Ray actor of the worker",
    "checkpoint/ranks.py": "asks verl's workers",
    "evaluation/rollout.py": "drives verl's agent loop manager",
    "engine/async_scheduling.py": "an executor of verl's for vLLM; imported where an engine is made",
    "engine/process.py": "makes a Ray actor of the engine's server",
    "engine/replica.py": "a replica of verl's",
    "network/probe.py": "a rank of torch.distributed",
    "network/ray_nodes.py": "makes an actor on each node",
    "start.py": "starts Ray actors",
    "agent_loop/worker.py": "a worker of verl's",
    "tools/code_interpreter.py": "a tool of verl's",
}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "verl_ext").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_only_what_runs_inside_verl_is_heavy(path: Path):
    name = str(path.relative_to(ROOT / "verl_ext"))
    assert bool(module_level_imports(path) & HEAVY) == (name in HEAVY_FILES)


@pytest.mark.parametrize("path", sorted((ROOT / "recipe").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_recipes_are_light_and_import_no_tests(path: Path):
    assert module_level_imports(path) & (HEAVY | {"tests", "e2b", "e2b_code_interpreter"}) == set()


def test_the_sdk_is_imported_in_one_place():
    users = [
        str(path.relative_to(ROOT))
        for path in ROOT.glob("verl_ext/**/*.py")
        if {"e2b", "e2b_code_interpreter"} & module_level_imports(path)
    ]
    assert all(user.startswith("verl_ext/sandbox/e2b") for user in users)
    assert users


def test_tasks_needs_invoke_alone():
    standard = {"__future__", "os", "pathlib", "shlex", "signal", "sys"}
    assert module_level_imports(ROOT / "tasks.py") <= {"invoke", *standard}


def test_no_folder_of_ours_shadows_a_package():
    # `docker/__init__.py` would hide the SDK of that name, `tests/__init__.py` would meet the wheel of verl's.
    assert not (ROOT / "docker" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()
