"""verl_ext.launch: a user's mistakes give exit status 2 and the cure, before anything is started.

Not covered here: a run itself (tests/e2e), signals (tests/e2e/test_faults.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import launch, preflight
from verl_ext.errors import AlarmStopError, ConfigurationError, DataError, SandboxUnavailableError, TrainingDiedError
from verl_ext.launch import guarded, main
from verl_ext.request import Configured, RunRequest, configure, fitting_hardware
from verl_ext.run_environment import run_environment
from verl_ext.settings import Settings

ROOT = Path(launch.__file__).parents[1]
MODEL = "models/Qwen--Qwen3-4B-Instruct-2507"


@pytest.fixture
def inputs(full_root: Path, no_complaint_of_this_machine: None) -> dict[str, str]:
    """The flags of a request with nothing wrong."""
    data = full_root / "data" / "retool"
    return {
        "--recipe": "retool", "--hardware": "cpu", "--model": str(full_root / MODEL), "--run-id": "mine",
        "--train": str(data / "train.parquet"), "--val": str(data / "val.parquet"),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(launch, "_train", started)
    monkeypatch.setattr(launch, "start_server", started)


def flags(inputs: dict[str, str]) -> list[str]:
    return [part for pair in inputs.items() for part in pair]


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"--model": "/no/model"}, [], "no model in /no/model"),
        ({"--model": "root/data/retool/train.parquet"}, [], "describes no decoder"),
        ({"--model": "Qwen/Qwen3-8B"}, [], "`invoke download --model Qwen/Qwen3-8B`"),
        ({"--train": "/no/train.parquet"}, [], "`invoke download` and then `invoke prepare-data`"),
        ({"--val": "/no/val.parquet"}, [], "data.val_files: /no/val.parquet is not there"),
        ({"--recipe": "retol"}, [], "did you mean retool?"),
        ({"--recipe": "no such recipe"}, [], "no such recipe"),
        ({"--hardware": "h20"}, [], "no hardware named 'h20'"),
        ({"--run-id": "../x"}, [], "run id '../x'"),
        ({"--run-id": "a b"}, [], "use letters, digits"),
        ({"--stop-on": "truncaton,grad-norm"}, [], "names 'truncaton', which is no alarm: did you mean truncation?"),
        ({}, ["trainer.save_frq=1"], "did you mean trainer.save_freq?"),
        ({}, ["trainer.save_freq"], "write KEY=VALUE"),
        ({}, ["data.train_batch_size=17"], "is no multiple of actor_rollout_ref.actor.ppo_mini"),
        ({}, ["actor_rollout_ref.rollout.n=0"], "rollout.n is 0"),
        ({}, ["trainer.project_name=${no.key}"], "does not resolve"),
        ({}, ["actor_rollout_ref.rollout.free_cache_engine=false"], "stops weight sync"),
    ],
)
def test_a_mistake_is_told_with_its_cure(changes, overrides, words, inputs, capsys, tmp_path: Path):
    assert main([*flags(inputs | changes), *overrides]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert not (tmp_path / "root" / "runs").exists(), "a refused request leaves no folder"


def test_all_that_preflight_finds_is_told_at_once(inputs, capsys):
    changes = {"--model": "/no", "--train": "/no.parquet", "--val": "/no.parquet"}
    assert main([*flags(inputs | changes), "actor_rollout_ref.rollout.mode=sync"]) == 2
    assert "4 problem(s) before the start" in capsys.readouterr().err


def test_settings_flags_keys_values_and_files_are_told_in_one_list(inputs, capsys, monkeypatch):
    monkeypatch.setenv("VERL_EXT_SANDBOX_MAX_ALIVE", "many")
    changes = {"--run-id": "a b", "--val": "/no.parquet"}
    overrides = ["trainer.save_frq=1", "trainer.test_freq", "trainer.project_name=???", "trainer.nnodes=two"]
    assert main([*flags(inputs | changes), *overrides]) == 2
    told = capsys.readouterr().err
    assert told.startswith("7 problem(s) before the start")
    for word in (
        "[settings]",
        "[run-id]",
        "save_freq?",
        "KEY=VALUE",
        "project_name has no value",
        "nnodes",
        "/no.parq",
    ):
        assert told.count(word) == 1, told


def test_wrong_settings_are_told_even_where_nothing_else_can_be_looked_at(inputs, capsys, monkeypatch):
    monkeypatch.setenv("VERL_EXT_LOG_LEVEL", "loud")
    assert main(flags(inputs | {"--hardware": "h300"})) == 2
    told = capsys.readouterr().err
    assert "VERL_EXT_LOG_LEVEL" in told
    assert "no hardware named 'h300'" in told


def test_a_run_folder_is_never_written_over(inputs, capsys, tmp_path: Path):
    (tmp_path / "root" / "runs" / "mine").mkdir(parents=True)
    assert main(flags(inputs)) == 2
    assert "is there already: choose another --run-id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key",
    [
        "trainer",
        "data",
        "actor_rollout_ref",
        "verl_ext",
        "ray_kwargs",
        "algorithm",
        "verl_ext.hub",
        "actor_rollout_ref.rollout",
        "actor_rollout_ref.actor",
        "custom_reward_function",
    ],
)
def test_a_value_in_place_of_a_group_is_told(key: str, inputs, capsys):
    assert main([*flags(inputs), "--dry-run", f"{key}=5"]) == 2
    assert f"{key} is 5, but it is a group of keys" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["verl_ext.run_dir", "+verl_ext.run_id", "verl_ext.config_dir"])
def test_what_the_flags_decide_is_no_override(key: str, inputs, capsys):
    assert main([*flags(inputs), f"{key}=/elsewhere"]) == 2
    assert f"{key.strip('+')} follows from the flags" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["E2B_API_KEY=e2b_canary0123456789", "+HF_TOKEN=e2b_canary0123456789"])
def test_a_setting_given_as_a_key_is_told_and_not_shown(override: str, inputs, capsys):
    assert main([*flags(inputs), override]) == 2
    told = capsys.readouterr().err
    assert "is a setting and no key of verl's: put it into .env" in told
    assert "canary" not in told


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["--hardware"], ["--hard", "cpu"], ["--help"]])
def test_the_command_line_itself_explains(arguments: list[str], capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == (0 if arguments == ["--help"] else 2)
    captured = capsys.readouterr()
    assert "invoke train" in captured.out + captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("wrong flag"), 2),
        (DataError("wrong data"), 2),
        (TrainingDiedError("a process died"), 70),
        (SandboxUnavailableError("no server"), 70),
        (AlarmStopError("an alarm"), 3),
        (launch.Interrupted(15), 143),
        (launch.Interrupted(2), 130),
    ],
)
def test_an_expected_failure_is_a_message_and_a_status(error: BaseException, status: int, capsys):
    def fail() -> None:
        raise error

    assert guarded(fail) == status
    words = "ended by SIG" if status > 128 else str(error)
    assert words in capsys.readouterr().err


def test_a_message_shows_nothing_in_the_shape_of_a_key(capsys):
    def fail() -> None:
        raise TrainingDiedError("401 for hf_0123456789abcdefghij: ask again")

    assert guarded(fail) == 70
    assert capsys.readouterr().err == "401 for ***: ask again\n"


def test_a_fault_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_success_is_zero():
    assert guarded(lambda: "anything") == 0


# --- what a good request becomes


def request(inputs: dict[str, str], *overrides: str, **changes: str) -> RunRequest:
    values = {name.strip("-").replace("-", "_"): value for name, value in (inputs | changes).items()}
    return RunRequest(**values, overrides=overrides)


def configured(inputs: dict[str, str], *overrides: str, **changes: str) -> Configured:
    found = configure(request(inputs, *overrides, **changes), Settings.load())
    assert [str(problem) for problem in found.problems] == []
    return found


def test_a_good_request_is_resolved_and_makes_no_folder(inputs, tmp_path: Path):
    found = configured(inputs, "trainer.save_freq=7")
    assert found.run_dir == tmp_path / "root" / "runs" / "mine"
    assert not found.run_dir.exists()
    assert found.config.trainer.save_freq == 7
    assert found.config.trainer.default_local_dir == f"{found.run_dir}/checkpoints"
    assert found.config.verl_ext.run_id == found.config.trainer.experiment_name == "mine"
    preflight.check(found.config, Settings.load())


def test_without_flags_the_recipe_the_data_root_and_this_machines_gpus_decide(
    full_root, no_complaint_of_this_machine, make_gpu, monkeypatch
):
    monkeypatch.setattr("verl_ext.request.visible_gpus", lambda: [make_gpu(0), make_gpu(1)])
    found = configured({})
    assert found.hardware == "h200x2"
    assert found.config.actor_rollout_ref.model.path == str(full_root / MODEL)
    assert found.config.data.val_files == str(full_root / "data" / "retool" / "val.parquet")
    assert found.run_dir.name.startswith("retool-20")


@pytest.mark.parametrize(
    ("count", "name", "memory_gib", "expected"),
    [(4, "NVIDIA H20", 95.6, "h20x4"), (1, "NVIDIA H200", 140.4, "h200x1"), (8, "NVIDIA H200", 140.4, "h200x8")],
)
def test_the_hardware_file_is_the_one_that_was_made_for_these_gpus(count, name, memory_gib, expected, make_gpu):
    assert fitting_hardware([make_gpu(index, memory_gib, name=name) for index in range(count)]) == expected


@pytest.mark.parametrize(
    ("count", "memory_gib", "words"),
    [
        (0, 0.0, "no GPU is to be seen here"),
        (3, 140.4, "3 GPUs of this kind"),
        (4, 80.0, "change its sizes with --set"),
    ],
)
def test_without_a_hardware_file_the_cure_is_told(count: int, memory_gib: float, words: str, make_gpu):
    with pytest.raises(ConfigurationError, match=words) as caught:
        fitting_hardware([make_gpu(index, memory_gib) for index in range(count)])
    assert "h200x1" in str(caught.value)


def test_relative_paths_are_the_users(inputs, tmp_path: Path):
    changes = {"--model": f"root/{MODEL}", "--train": "root/data/retool/train.parquet"}
    config = configured(inputs, **changes).config
    assert config.actor_rollout_ref.model.path == str(tmp_path / "root" / MODEL)
    assert config.data.train_files == str(tmp_path / "root" / "data" / "retool" / "train.parquet")


@pytest.mark.parametrize("name", ["my model", "a #b", "a: b", "[x]", "{y}", "'q'", "é", "1e-6", "=", "a=b"])
def test_a_path_may_hold_anything(name: str, inputs, tmp_path: Path):
    (tmp_path / name).symlink_to(tmp_path / "root" / MODEL)
    config = configured(inputs, **{"--model": str(tmp_path / name)}).config
    assert config.actor_rollout_ref.model.path == str(tmp_path / name)


def test_an_override_wins_over_a_flag(inputs, full_root: Path):
    other = full_root / "data" / "retool" / "train.parquet"
    config = configured(inputs, f"data.val_files=[{inputs['--val']}, {other}]").config
    assert list(config.data.val_files) == [inputs["--val"], str(other)]


def test_settings_given_as_flags_reach_every_process(inputs, monkeypatch, tmp_path: Path):
    seen = []
    monkeypatch.setattr(launch, "run", lambda request, settings, *_: seen.append((request, settings)))
    (tmp_path / "other.env").write_text("VERL_EXT_LOG_LEVEL=debug\n")
    extra = ["--sandbox", "local", "--data-root", str(tmp_path / "elsewhere"), "--env-file", "other.env"]
    assert main([*flags(inputs), *extra]) == 0
    [(request, settings)] = seen
    assert settings.data_root == tmp_path / "elsewhere"
    assert (settings.backend, settings.log_level) == ("local", "debug")
    environment = run_environment(request, settings, tmp_path, None, cpu=False)
    assert environment["VERL_EXT_SANDBOX_BACKEND"] == "local"
    assert environment["VERL_EXT_ENV_FILE"] == str(tmp_path / "other.env")


def test_workers_on_gpus_get_the_choice_of_cudas_libraries(inputs, monkeypatch, tmp_path: Path):
    seen = []
    monkeypatch.setattr(launch, "run", lambda request, settings, *_: seen.append((request, settings)))
    (tmp_path / "other.env").write_text("CUDA_COMPAT=off\n")
    assert main([*flags(inputs), "--env-file", "other.env"]) == 0
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine:/usr/local/cuda/compat")
    environment = run_environment(*seen[0], tmp_path, None, cpu=False)
    assert (environment["CUDA_COMPAT"], environment["LD_LIBRARY_PATH"]) == ("off", "/opt/mine")


def test_what_is_compiled_outlives_a_container_unless_the_user_has_a_place_for_it(inputs, monkeypatch, tmp_path: Path):
    seen = []
    monkeypatch.setattr(launch, "run", lambda request, settings, *_: seen.append((request, settings)))
    assert main([*flags(inputs), "--data-root", str(tmp_path)]) == 0
    [(request, settings)] = seen
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    environment = run_environment(request, settings, tmp_path, None, cpu=False)
    assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "cache" / "compiled" / "vllm")
    assert environment["HF_DATASETS_CACHE"] == str(tmp_path / "cache" / "datasets")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled" / "inductor")
    assert "TRITON_CACHE_DIR" not in environment  # Ray's workers inherit it


def test_importing_the_launcher_loads_nothing_heavy():
    heavy = "torch", "ray", "vllm", "verl", "transformers", "tensordict"
    modules = "verl_ext.launch, verl_ext.compose, verl_ext.preflight, verl_ext.settings, verl_ext.export, tasks"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
