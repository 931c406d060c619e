"""One sandbox looked at closely: speed, state, streaming, deadlines, packages, size, contexts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from verl_ext.check.findings import FAILED, OK, WARNING, Finding
from verl_ext.errors import SandboxError
from verl_ext.sandbox.interface import Sandbox, SandboxBackend
from verl_ext.sandbox.metrics import percentile

PACKAGES = ("numpy", "scipy", "sympy", "pandas", "matplotlib", "networkx")
RUN_TIMEOUT_S = 20.0
SAMPLED, RUNS = 3, 8
MAX_CONTEXTS = 8
_SIZE = """
import json as _j, os as _o
_m = [int(l.split()[1]) // 1024 for l in open('/proc/meminfo') if l.startswith('MemTotal')]
try:
    _c = int(open('/sys/fs/cgroup/memory.max').read()) >> 20
except (OSError, ValueError):
    _c = 0
_r = [int(l.split()[1]) // 1024 for l in open('/proc/self/status') if l.startswith('VmRSS')]
_n = len(_o.sched_getaffinity(0))
print(_j.dumps({'cpus': _n, 'total': _m[0], 'cgroup': _c, 'rss': (_r or [0])[0]}))
"""


async def check_latency(sandboxes: Sequence[Sandbox], create_s: Sequence[float]) -> Finding:
    """Latencies of the creates as measured, and of first and later runs in a few of the sandboxes."""
    firsts, runs = [], []
    try:
        for sandbox in sandboxes[:SAMPLED]:
            firsts.append((await sandbox.run_code("1", timeout_s=RUN_TIMEOUT_S)).elapsed_s)
            runs += [(await sandbox.run_code("1", timeout_s=RUN_TIMEOUT_S)).elapsed_s for _ in range(RUNS)]
    except SandboxError as error:
        return Finding("latency", FAILED, str(error))
    return _latency("latency", {"create": create_s, "first_run": firsts, "run": runs})


async def check_kills(backend: SandboxBackend, sandboxes: Sequence[Sandbox]) -> Finding:
    """End all of them, and how long each kill took."""
    times = []
    for sandbox in sandboxes:
        began_s = time.monotonic()
        try:
            await backend.kill(sandbox.sandbox_id)
        except SandboxError as error:  # the sweep at the end of the check tries again
            return Finding("kill", WARNING, str(error))
        times.append(time.monotonic() - began_s)
    return _latency("kill", {"kill": times})


def _latency(part: str, seconds: Mapping[str, Sequence[float]]) -> Finding:
    numbers = {
        f"{name}_p{share:.0f}_s": percentile(values, share / 100)
        for name, values in seconds.items()
        for share in (50, 95)
    }
    text = ", ".join(
        f"{name.replace('_', ' ')} {numbers[f'{name}_p50_s']:.2f} s (p95 {numbers[f'{name}_p95_s']:.2f})"
        for name in seconds
    )
    return Finding(part, OK, text, numbers)


async def check_behaviour(sandbox: Sandbox) -> list[Finding]:
    """State between calls, output while code runs, and what a deadline leaves behind."""
    await sandbox.run_code("x = 20", timeout_s=RUN_TIMEOUT_S)
    kept = (await sandbox.run_code("x + 1", timeout_s=RUN_TIMEOUT_S)).results == ("21",)
    state = (
        Finding("state", OK, "kept between calls")
        if kept
        else Finding("state", FAILED, "variables are lost between calls: is the template a code interpreter?")
    )
    code = "import time\nprint('begun', flush=True)\ntime.sleep(30)"
    began_s = time.monotonic()
    late = await sandbox.run_code(code, timeout_s=2.0)
    took_s = time.monotonic() - began_s
    streams = late.stdout == "begun\n"
    streaming = (
        Finding("streaming", OK, "output comes while the code runs")
        if streams
        else Finding(
            "streaming", WARNING, "output comes at the end only: of code past its deadline the model will see none"
        )
    )
    began_s = time.monotonic()
    try:
        again = await sandbox.run_code("x", timeout_s=10.0)
        free_s = time.monotonic() - began_s
        text = f"ours fires after {took_s:.1f} s of 2; the service stops the code {free_s:.1f} s later"
        found = Finding("deadline", OK, text, {"free_after_s": free_s}) if not again.timed_out else None
    except SandboxError:
        found = None
    blocked = "the service goes on with code past its deadline: its interpreter is ended, as it always is here"
    return [state, streaming, found or Finding("deadline", OK, blocked)]


async def check_packages(sandbox: Sandbox) -> Finding:
    """Which of the packages that models like to import are there."""
    code = (
        "import importlib.metadata as _i, json as _j\n_f = {}\n"
        f"for _n in {PACKAGES!r}:\n    try:\n        _f[_n] = _i.version(_n)\n    except _i.PackageNotFoundError:\n"
        "        pass\nimport sys as _s\nprint(_j.dumps([_s.version.split()[0], _f]))"
    )
    execution = await sandbox.run_code(code, timeout_s=RUN_TIMEOUT_S)
    if execution.error is not None:
        return Finding("packages", WARNING, f"could not be listed: {execution.error.value[:200]}")
    version, found = json.loads(execution.stdout)
    text = f"Python {version}; " + ", ".join(f"{name} {number}" for name, number in found.items())
    if missing := [name for name in PACKAGES if name not in found]:
        text += f"; not there: {', '.join(missing)}: the model will see ModuleNotFoundError, or choose a template"
        return Finding("packages", WARNING, text)
    return Finding("packages", OK, text)


async def check_size(sandbox: Sandbox, wanted: int = MAX_CONTEXTS) -> Finding:
    """CPUs and memory, and how many code contexts fit, by opening some.

    Half of the memory is left to what the model's code will need; a context without code is the least that one
    takes.
    """
    execution = await sandbox.run_code(_SIZE, timeout_s=RUN_TIMEOUT_S)
    if execution.error is not None:
        return Finding("size", WARNING, f"could not be read: {execution.error.value[:200]}")
    size = json.loads(execution.stdout)
    total_mib = min(size["total"], size["cgroup"] or size["total"])
    opened: list[str] = []
    times = []
    try:
        for _ in range(wanted):
            began_s = time.monotonic()
            opened.append(await sandbox.open_context())
            times.append(time.monotonic() - began_s)
    except SandboxError as error:
        trouble = f"; context {len(opened) + 1} could not be opened: {error}"
    else:
        trouble = ""
    each_mib = max(1, size["rss"])
    fit = int(total_mib / 2 / each_mib)
    contexts = max(0, min(len(opened), fit))
    numbers = {
        "cpus": float(size["cpus"]), "memory_mib": float(total_mib), "context_mib": float(each_mib),
        "contexts": float(contexts), "open_context_s": percentile(times, 0.5),
    }  # fmt: skip
    text = (
        f"{size['cpus']} CPU, {total_mib} MiB; a context takes {each_mib} MiB and {numbers['open_context_s']:.2f} s; "
        f"{contexts} to a sandbox are safe (up to {wanted} were tried){trouble}"
    )
    return Finding("size", OK if contexts else WARNING, text, numbers)
