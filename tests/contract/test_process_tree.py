"""A process that must not outlive the one that it works for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The victim and the one that goes with it are no parent and child, as the engine and its server are not.
GO_WITH = """
import sys, time
from verl_ext.process_tree import end_with
end_with(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_other_whatever_ends_that(number):
    other = subprocess.Popen(["sleep", "60"])
    with subprocess.Popen([sys.executable, "-c", GO_WITH, str(other.pid)], cwd=ROOT, stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == b"up\n"
            time.sleep(0.1)
            assert one.poll() is None
            os.kill(other.pid, number)
            assert one.wait(30) == -signal.SIGKILL
        finally:
            for process in (one, other):
                process.kill()
                process.wait()


def test_it_ends_at_once_with_one_that_has_ended():
    other = subprocess.Popen(["true"])
    other.wait()
    done = subprocess.run([sys.executable, "-c", GO_WITH, str(other.pid)], cwd=ROOT, capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
