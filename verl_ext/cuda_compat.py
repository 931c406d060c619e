"""Whether CUDA's compatibility libraries go before the host's driver, decided where a process starts.

A CUDA image brings a user-mode `libcuda` of its own in `/usr/local/cuda/compat`. It lets CUDA 12.8 run on an
older driver branch of a data-centre GPU. Anywhere else it breaks CUDA: error 803 on a newer driver (seen on an
H200, driver 580.159.04 under compat 580.95.05), error 804 on a GeForce. So no image can set LD_LIBRARY_PATH for
all hosts, and it is decided at each start: by the image's entrypoint, by every task, for every Ray worker.

`CUDA_COMPAT` says how:

    auto    on if the driver's branch is older than the library's, the GPU is no consumer's, and cuInit in a
            process of its own proves that it works; else off
    on      on, whatever comes of it
    off     off

Entries that lead to a compatibility folder are taken out of an inherited LD_LIBRARY_PATH before; all others stay.

Run as a program it needs nothing but Python's standard library, and takes about 20 ms:

    python -I -S verl_ext/cuda_compat.py                   say what is decided here and why
    python -I -S verl_ext/cuda_compat.py exec COMMAND...   become COMMAND with the decision made

Source: NVIDIA, CUDA Compatibility, "Forward Compatibility" (data-centre GPUs, select RTX; not on WSL).
"""

# ruff: noqa: TID251 - it hands the environment on

import glob
import os
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping

MODES = ("auto", "on", "off")
VARIABLE, SEARCH_PATH = "CUDA_COMPAT", "LD_LIBRARY_PATH"
# cuda.h of CUDA 12.8
CUDA_ERRORS = {
    100: "no CUDA device is detected",
    802: "system not yet initialised",
    803: "system has unsupported display driver / cuda driver combination",
    804: "forward compatibility was attempted on non supported HW",
    999: "unknown error",
}
PROBE_TIMEOUT_S = 60
_FOLDERS = ("usr/local/cuda/compat", "usr/local/cuda-*/compat")
_COMPAT_ENTRY = re.compile(r"(^|/)cuda[^/]*/(.*/)?compat(/|$)")
# "... UNIX x86_64 Kernel Module  535.129.03 ...", "... UNIX Open Kernel Module for x86_64  580.159.04 ..."
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_CONSUMER = re.compile(r"GeForce|TITAN", re.IGNORECASE)
_PROBE = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"

Decision = namedtuple("Decision", ("mode", "on", "reason", "search_path", "trouble", "driver", "library"))
Decision.__doc__ = """What was decided.

Attributes:
    mode: auto, on or off.
    on: whether the compatibility folder comes first.
    reason: why, for people.
    search_path: LD_LIBRARY_PATH to use; "" for none.
    trouble: what will fail and the cure, "" if nothing is known to.
    driver: the host driver's version, "" if there is none.
    library: version of the compatibility library, "" if there is none.
"""


class Host:
    """What is asked of this machine; a test gives another root and other answers.

    Args:
        root: folder that stands for /.
        smi: answers of nvidia-smi to a query, one a GPU, [] without it.
        probe: LD_LIBRARY_PATH to what cuInit returns under it, or to a text if libcuda cannot be loaded.
    """

    def __init__(
        self,
        root: str = "/",
        smi: Callable[[str], list[str]] | None = None,
        probe: Callable[[str], int | str] | None = None,
    ) -> None:
        self.root = root
        self.smi = smi or ask_nvidia_smi
        self.probe = probe or probe_cuda

    def driver(self) -> str:
        """Version of the kernel's driver, "" if there is none or it cannot be read."""
        match = _DRIVER.search(self._read("proc/driver/nvidia/version"))
        if match:
            return match[1]
        answers = self.smi("driver_version") if self.has_device() else []
        return answers[0] if answers and re.fullmatch(r"\d+(\.\d+)+", answers[0]) else ""

    def has_device(self) -> bool:
        """Whether a GPU was handed to this machine or container."""
        return any(os.path.exists(os.path.join(self.root, name)) for name in ("dev/nvidiactl", "dev/dxg"))

    def is_wsl(self) -> bool:
        """Whether this is Windows's Linux, which has the driver of Windows."""
        return os.path.exists(os.path.join(self.root, "dev/dxg"))

    def gpu_names(self) -> list[str]:
        """Names of the GPUs."""
        pages = glob.glob(os.path.join(self.root, "proc/driver/nvidia/gpus/*/information"))
        models = [re.search(r"^Model:\s*(.+)$", self._read(page), re.MULTILINE) for page in sorted(pages)]
        return [model[1].strip() for model in models if model] or self.smi("name")

    def library(self) -> tuple[str, str]:
        """Folder and version of the newest compatibility library, ("", "") if there is none."""
        found = []
        for pattern in _FOLDERS:
            for folder in glob.glob(os.path.join(self.root, pattern)):
                version = _library_version(folder)
                if version:
                    found.append((_numbers(version), -len(folder), folder, version))
        return max(found)[2:] if found else ("", "")

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.root, name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""


def decide(environ: Mapping[str, str], mode: str = "", host: Host | None = None) -> Decision:
    """Decide for processes that are started with `environ` on this machine.

    Args:
        environ: for CUDA_COMPAT and LD_LIBRARY_PATH.
        mode: in place of CUDA_COMPAT.
        host: this machine if None.
    """
    host = host or Host()
    asked = (mode or environ.get(VARIABLE, "").strip().strip("'\"") or "auto").lower()
    trouble = "" if asked in MODES else f"{VARIABLE} is {asked!r}, which is none of auto, on, off: taken as auto"
    mode = asked if asked in MODES else "auto"
    inherited = [entry for entry in environ.get(SEARCH_PATH, "").split(":") if entry]
    kept = [entry for entry in inherited if not _COMPAT_ENTRY.search(entry)]
    folder, library = host.library()
    driver = host.driver()
    without = ":".join(kept)

    def off(reason: str, trouble: str = trouble) -> Decision:
        stripped = "" if len(kept) == len(inherited) else f"; taken out of {SEARCH_PATH}"
        return Decision(mode, False, reason + stripped, without, trouble, driver, library)

    if mode == "off":
        return off(f"{VARIABLE}=off")
    if not folder:
        missing = f"{VARIABLE}=on, but no {_FOLDERS[0]} with a libcuda is here: set {VARIABLE}=auto"
        return off("no compatibility library here", missing if mode == "on" else trouble)
    if mode == "auto" and (reason := _against(host, driver, library)):
        return off(reason)
    within = ":".join([folder, *kept])
    said = f"driver {driver or 'unknown'}, library {library}"
    failure = _failure(host.probe(within))
    if mode == "on":
        cure = f"{VARIABLE}=on, and under {folder} CUDA does not start ({failure}): set {VARIABLE}=auto"
        return Decision(mode, True, f"{VARIABLE}=on ({said})", within, cure if failure else "", driver, library)
    if failure:
        return off(
            f"the driver is older ({said}), but under the library CUDA does not start ({failure})",
            f"driver {driver} is too old for this image's CUDA, and its compatibility library does not help here "
            f"({failure}): install a driver of branch {library.partition('.')[0]} or newer on the host",
        )
    return Decision(mode, True, f"the driver is older ({said}), and CUDA starts", within, trouble, driver, library)


def line(decision: Decision) -> str:
    """What is said of a decision."""
    said = f"CUDA compatibility library {'on' if decision.on else 'off'}: {decision.reason}"
    return f"{said}\n{decision.trouble}" if decision.trouble else said


def environment(decision: Decision, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the decision in it."""
    changed = {name: value for name, value in environ.items() if name != SEARCH_PATH}
    return {**changed, SEARCH_PATH: decision.search_path} if decision.search_path else changed


def apply(environ: Mapping[str, str], host: Host | None = None) -> dict[str, str]:
    """The environment for a child process; says the decision if it changes something or something will fail."""
    decision = decide(environ, host=host)
    if decision.trouble or decision.search_path != environ.get(SEARCH_PATH, ""):
        sys.stderr.write(line(decision) + "\n")
    return environment(decision, environ)


def ask_nvidia_smi(query: str) -> list[str]:
    """nvidia-smi's answer, one line a GPU; [] if there is none or it fails."""
    import subprocess

    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [answer.strip() for answer in done.stdout.splitlines() if answer.strip()]


def probe_cuda(search_path: str) -> int | str:
    """What cuInit returns in a process of its own under an LD_LIBRARY_PATH; a text if it cannot be called."""
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE],
            env={**os.environ, SEARCH_PATH: search_path},
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return int(done.stdout)


def _against(host: Host, driver: str, library: str) -> str:
    """Why the library is not wanted here, "" if it may be."""
    if not driver:
        return "the driver's version cannot be read" if host.has_device() else "no NVIDIA driver here"
    if host.is_wsl():
        return "on WSL the driver is Windows's"
    if _numbers(driver)[0] >= _numbers(library)[0]:
        newer = "as new as" if _numbers(driver)[0] == _numbers(library)[0] else "newer than"
        return f"the driver ({driver}) is {newer} the library ({library})"
    if consumer := [name for name in host.gpu_names() if _CONSUMER.search(name)]:
        return f"{consumer[0]} is a consumer's GPU, which the library refuses; driver {driver}, library {library}"
    return ""


def _failure(answer: int | str) -> str:
    if answer == 0:
        return ""
    return f"cuInit: error {answer}, {CUDA_ERRORS.get(answer, 'see cuda.h')}" if isinstance(answer, int) else answer


def _library_version(folder: str) -> str:
    """Version of a folder's libcuda: of the one that libcuda.so.1 leads to, else of the newest."""
    names = [os.path.basename(os.path.realpath(os.path.join(folder, "libcuda.so.1")))]
    others = (os.path.basename(path) for path in glob.glob(os.path.join(folder, "libcuda.so.*")))
    names += sorted(others, key=_numbers, reverse=True)
    versions = (re.fullmatch(r"libcuda\.so\.(\d+(?:\.\d+)+)", name) for name in names)
    return next((match[1] for match in versions if match), "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def main(arguments: list[str]) -> int:
    """Say the decision, or become a command with it."""
    decision = decide(os.environ)
    if not arguments:
        sys.stdout.write(line(decision) + "\n")
        return 0
    if arguments[0] != "exec" or len(arguments) == 1:
        sys.stderr.write("usage: cuda_compat.py [exec COMMAND [ARGUMENT...]]\n")
        return 2
    # Nothing to be said where there is neither a GPU nor anything that was asked for.
    if decision.driver or decision.trouble or decision.mode != "auto":
        sys.stderr.write(line(decision) + "\n")
        sys.stderr.flush()
    command = arguments[1:]
    try:
        os.execvpe(command[0], command, environment(decision, os.environ))  # noqa: S606 - that is what it is for
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run ({error.strerror})\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
