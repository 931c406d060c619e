"""verl_ext.tools.code_interpreter as verl builds and calls it: nothing raises, nothing is None."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    from verl_ext.tools import code_interpreter
    from verl_ext.tools.code_interpreter import INFRA_FAILED_TEXT, CodeInterpreterConfig, CodeInterpreterTool

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import ConfigurationError, SandboxUnavailableError
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.interface import Execution
from verl_ext.sandbox.pool import SessionPool

ENTRY = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"][0]
STATUSES = {"ok", "error", "timeout", "bad_arguments", "infra_failed"}


def make(**config: Any) -> CodeInterpreterTool:
    return CodeInterpreterTool(ENTRY["config"] | config, OpenAIFunctionToolSchema.model_validate(ENTRY["tool_schema"]))


class Interpreter:
    """A tool over a fake service."""

    def __init__(self, script: FaultScript | None = None, **config: Any) -> None:
        self.backend = FakeBackend(script)
        self.pool = SessionPool(self.backend, acquire_timeout_s=0.2)
        self.tool = make(**config)
        code_interpreter.use_sessions(self.pool.session)

    async def run(self, *codes: Any) -> list[tuple[str, str]]:
        name, response = await self.tool.create(instance_id="t")
        assert (name, isinstance(response, ToolResponse)) == ("t", True)
        found = []
        for code in codes:
            answer, reward, facts = await self.tool.execute("t", code if isinstance(code, dict) else {"code": code})
            assert isinstance(answer.text, str)
            assert reward == 0.0
            assert facts["status"] in STATUSES
            assert set(facts) - {"cause"} == {"status", "elapsed_s", "waited_s", "png_count"}
            assert ("cause" in facts) == (facts["status"] == "infra_failed")
            found.append((facts["status"], answer.text))
        assert await self.tool.release("t") is None
        assert not self.backend.alive
        return found


@pytest.fixture(autouse=True)
def _no_sessions_afterwards():
    yield
    code_interpreter.use_sessions(None)


async def test_one_instance_keeps_its_state():
    assert await Interpreter().run("x = 6", "x * 7") == [("ok", "(no output)"), ("ok", "42")]


async def test_a_traceback_is_an_answer():
    [(status, text)] = await Interpreter().run("1 / 0")
    assert status == "error"
    assert text.endswith("ZeroDivisionError: division by zero")


async def test_a_deadline_is_an_answer_and_a_timeout_of_the_codes_own_is_an_error():
    found = await Interpreter(call_timeout_s=0.1).run("while True: pass", "raise TimeoutError('own')")
    assert [status for status, _ in found] == ["timeout", "error"]


async def test_a_deadline_after_a_result_is_a_timeout_too():
    answer = Execution(results=("1",), error=None, timed_out=True)
    found = await Interpreter(FaultScript(answer=lambda code: answer)).run("1")
    assert found[0][0] == "timeout"


@pytest.mark.parametrize(
    "parameters", [{}, {"code": None}, {"code": 3}, {"code": " \n"}, {"code": ["x"]}, {"source": "1"}, [], None, "1"]
)
async def test_wrong_arguments_are_answered_and_start_no_sandbox(parameters: Any):
    interpreter = Interpreter()
    await interpreter.tool.create(instance_id="t")
    answer, _, facts = await interpreter.tool.execute("t", parameters)
    assert facts["status"] == "bad_arguments"
    assert 'needs the argument "code"' in answer.text
    assert interpreter.backend.creates == 0
    await interpreter.tool.release("t")


@pytest.mark.parametrize(
    "script",
    [
        FaultScript(create_errors=dict.fromkeys(range(1, 99), SandboxUnavailableError("x"))),
        FaultScript(run_errors={1: SandboxUnavailableError("x")}),
        FaultScript(die_after_runs=0),
    ],
)
async def test_a_failing_service_is_told_apart_from_failing_code(script: FaultScript):
    found = await Interpreter(script).run("1", "2")
    assert found == [("infra_failed", INFRA_FAILED_TEXT)] * 2


async def test_without_sessions_or_create_it_is_our_failure():
    tool = make()
    assert await tool.create() != await tool.create()
    _, _, facts = await tool.execute("never made", {"code": "1"})
    assert facts["status"] == "infra_failed"
    await tool.release("never made")


async def test_a_release_that_fails_is_not_raised():
    interpreter = Interpreter(FaultScript(kill_errors=dict.fromkeys(range(1, 9), SandboxUnavailableError("x"))))
    await interpreter.tool.create(instance_id="t")
    await interpreter.tool.execute("t", {"code": "1"})
    await interpreter.tool.release("t")
    await interpreter.tool.release("t")


async def test_instances_run_side_by_side():
    interpreter = Interpreter()
    for name in ("a", "b"):
        await interpreter.tool.create(instance_id=name)
    await asyncio.gather(*(interpreter.tool.execute(name, {"code": f"x = '{name}'"}) for name in ("a", "b")))
    answers = [(await interpreter.tool.execute(name, {"code": "x"}))[0].text for name in ("a", "b")]
    assert answers == ["'a'", "'b'"]
    for name in ("a", "b"):
        await interpreter.tool.release(name)


def test_building_it_is_silent_and_opens_nothing(capsys):
    # verl builds tools in each data set, on the driver, where nothing runs.
    make()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"call_timeout": 3}, "unknown keys call_timeout"),
        ({"call_timeout_s": 0}, "call_timeout_s is 0"),
        ({"call_timeout_s": "30"}, "call_timeout_s is '30'"),
        ({"max_output_chars": True}, "max_output_chars is True"),
        ({"sandbox_ttl_s": None}, "sandbox_ttl_s is None"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        make(**config)


def test_the_shipped_file_is_the_default():
    assert CodeInterpreterConfig.of(ENTRY["config"]) == CodeInterpreterConfig()


def test_the_schema_is_what_the_chat_template_gets():
    assert make().tool_schema.model_dump(exclude_unset=True, exclude_none=True) == ENTRY["tool_schema"]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # verl leaves the event loop open that it makes
def test_verl_finds_the_class_by_its_name(monkeypatch: pytest.MonkeyPatch):
    from verl.tools.utils.tool_registry import get_tool_class

    assert get_tool_class(ENTRY["class_name"]) is CodeInterpreterTool
    assert Path(code_interpreter.__file__).parts[-3:] == ("verl_ext", "tools", "code_interpreter.py")
