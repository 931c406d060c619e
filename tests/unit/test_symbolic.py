"""Reading answers, exact values, and the pool of processes that can be killed."""

import os
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.retool.symbolic import equality
from recipe.retool.symbolic.equality import same_value
from recipe.retool.symbolic.exact import NotRational, TooLarge, rational_value
from recipe.retool.symbolic.expressions import MAX_CHARS, parse
from recipe.retool.symbolic.pool import KillablePool, LimitReached, Limits
from recipe.retool.symbolic.tree import Unreadable
from verl_ext.errors import GraderError

ROOT = Path(__file__).parents[2]
QUICK = Limits(cpu_s=0.3, wall_s=20.0, memory_mib=512)
COMPARE = "recipe.retool.symbolic.compare:compare"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2^{10}", 1024),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^{-1}", Fraction(1, 2)),
        ("6/2*3", 9),
        ("1 3/4", Fraction(7, 4)),
        (r"2 \cdot -3", -6),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{1}{2}3", None),
        (r"\sqrt[3]{-8}", -2),
        (r"8^{2/3}", 4),
        (r"|-3|+|2-5|", 6),
        ("3!!", 720),
        (r"\binom52", 10),
        (r"2^{3^2}", 512),
        ("10,080", 10080),
        (r"0.\overline{9}", 1),
    ],
)
def test_exact_values(text, value):
    if value is None:
        with pytest.raises(Unreadable):
            parse(text)
    else:
        assert rational_value(parse(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "2^3^4",
        "12 34",
        "x2",
        r"\sqrt12",
        "[3]",
        "(1,2",
        "1 +",
        "2 4/3",
        r"\sin^{-1} x",
        "a=b,",
        "3..4",
        r"\sum 3",
        "f'(x)",
    ],
)
def test_two_readings_or_none_are_unreadable(text):
    with pytest.raises(Unreadable):
        parse(text)


@pytest.mark.parametrize("text", ["10^{10^{10}}", "9^{9^{9^9}}", "99999!", r"\binom{99999}{500}", "(10^{6000})^{9}"])
def test_large_values_are_refused_before_they_are_computed(text):
    with pytest.raises(TooLarge):
        rational_value(parse(text))


@pytest.mark.parametrize("text", [r"\sqrt2", "1/0", "0^0", "0^{-1}", "(-1)!", "x", r"\pi", "(1,2)", r"(-8)^{1/3}"])
def test_what_is_not_rational_is_said(text):
    with pytest.raises(NotRational):
        rational_value(parse(text))


MARKS = [
    "\\frac", "\\sqrt", "{", "}", "(", ")", "[", "]", "|", "^", "_", "!", "1", "23", ".", ",", " ", "x", "ab", "\\pi",
    "\\text{or}", "-", "+", "\\pm", "=", "<", "\\le", "\\cup", "\\{", "\\}", "\\begin", "pmatrix", "&", "\\\\", "\\log",
    "\\binom", "\\overline", "\\infty", "/",
]  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(MARKS), max_size=40).map("".join)))
def test_reading_gives_a_tree_or_says_unreadable(text):
    try:
        node = parse(text)
    except Unreadable:
        return
    try:
        rational_value(node)
    except (NotRational, TooLarge):
        return


@pytest.mark.parametrize(
    "text",
    [
        "(" * 900,
        "{" * 900,
        "-" * 1900,
        "2^" * 900,
        "2^" + "-" * 1900,
        r"\sqrt" * 300,
        "|" * 900,
        "1+" * 900 + "1",
        "x" * 1999,
        "3" + "!" * 1900,
    ],
)
def test_deep_and_long_texts_end(text):
    same_value(text, "33")
    same_value("(" * 30 + text[:MAX_CHARS] + ")" * 30, "33")


@pytest.fixture
def pool():
    pools = []

    def make(function=COMPARE, limits=QUICK, size=1):
        pools.append(KillablePool(function, limits, size))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}


def test_nothing_runs_before_the_first_call_and_nothing_after_the_last(pool):
    before = children()
    one = pool()
    assert children() == before
    assert one.call("x+x", "2x") == "equal"
    [started] = children() - before
    one.close()
    assert not Path(f"/proc/{started}").exists()
    assert one.call("x+x", "2x") == "equal"  # closed is not broken


@pytest.mark.parametrize(
    ("function", "arguments", "limit"),
    [
        ("time:sleep", [600], "wall time"),
        # One call in C that holds the interpreter's lock and sees no signal handler.
        ("builtins:pow", [7, 10**8], "processor time"),
        ("builtins:bytearray", [1 << 40], "MemoryError"),
        ("os:abort", [], "status"),
        ("builtins:int", ["x"], "ValueError"),
    ],
    ids=["sleeps", "holds the lock", "memory", "dies", "raises"],
)
def test_every_limit_ends_a_call_and_the_next_one_works(pool, function, arguments, limit):
    wall_s = 0.4 if function == "time:sleep" else 60.0
    one = pool(function, Limits(cpu_s=0.3, wall_s=wall_s, memory_mib=512))
    for _ in range(2):
        with pytest.raises(LimitReached, match=limit):
            one.call(*arguments)


def test_an_answer_that_sympy_cannot_finish_is_undecided(monkeypatch, pool):
    monkeypatch.setattr(equality, "POOL", pool())
    same_value.cache_clear()
    assert same_value("x^{9999999}-1", "(x-1)(x+1)") == "undecided"
    assert same_value("x^2-1", "(x-1)(x+1)") == "equal"
    same_value.cache_clear()


def test_a_process_that_was_killed_from_outside_costs_nothing(pool):
    before, one = children(), pool()
    one.call("x+x", "2x")
    [pid] = children() - before
    os.kill(pid, 9)
    assert one.call("x+x", "2x") == "equal"


def test_processes_are_replaced_after_their_share_of_calls(pool):
    before, one = children(), pool("os:getpid", Limits(calls=2))
    assert len({one.call() for _ in range(6)}) == 3
    assert len(children() - before) <= 1


def test_threads_share_the_processes(pool):
    one, answers = pool("os:getpid", size=2), []
    threads = [threading.Thread(target=lambda: answers.append(one.call())) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    assert len(set(answers)) <= 2


def test_no_secret_reaches_the_processes(pool, monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", "e2b_secret")
    assert pool("os:getenv").call("E2B_API_KEY", "none") == "none"


def test_processes_end_with_whoever_asked():
    code = (
        "import os, signal\n"
        "from recipe.retool.symbolic.pool import KillablePool\n"
        "pool = KillablePool('os:getpid')\n"
        "print(pool.call(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    process = Path("/proc") / done.stdout.strip()
    for _ in range(300):
        if not process.exists() or " Z " in (process / "stat").read_text():
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{process} is alive")


def test_a_fork_uses_processes_of_its_own(pool):
    one = pool("os:getpid")
    parents = one.call()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(one.call()).encode())
            one.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    answer = os.read(reader, 100)
    os.close(reader)
    assert int(answer) != parents
    assert one.call() == parents


@pytest.mark.parametrize("function", ["no_such_module:compare", "recipe.retool.symbolic.compare:nothing"])
def test_an_installation_that_cannot_compare_is_an_error_with_a_cure(pool, function):
    with pytest.raises(GraderError, match=r"does not start.*invoke setup"):
        pool(function).call("1", "1")


def test_sympy_is_not_imported_here():
    code = (
        "import sys\nfrom recipe.retool import reward\n"
        "assert reward.compute_score('x', r'\\boxed{2^5}', '32')['acc'] == 1.0\n"
        "print([name for name in ('sympy', 'torch', 'verl', 'multiprocessing') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
