"""What a run reads, made in a moment and without torch: a model's folder in outline, and prepared data."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import DictConfig

TEMPLATE = Path(__file__).resolve().parents[1] / "data" / "qwen3_2507_chat_template.jinja"
# config.json of Qwen3-4B-Instruct-2507, as far as sizes go.
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_4B_PARAMETERS = 4_022_468_096


# Hydra reads some thirty files for each configuration that is composed, with PyYAML's slow loader unless this is done:
# a tenth of what these tests take.
if hasattr(yaml, "CSafeLoader"):
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc]


def write_model(folder: Path, **config: object) -> Path:
    """A folder like Qwen3-4B's: sizes, a tokenizer of bytes, the real chat template, weights that are a header only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_4B, **config}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    header = json.dumps({"all": {"dtype": "BF16", "shape": [QWEN3_4B_PARAMETERS], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def write_data(path: Path, rows: int, question: str = "What is 1 + 1?") -> Path:
    """Rows with the columns of prepared data."""
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "agent_name": "tool_agent",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.Table.from_pylist([row]).schema
    pq.write_table(pa.Table.from_pylist([row] * rows, schema), path)
    return path


@pytest.fixture(scope="session")
def data_root_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    write_model(root / "models" / "Qwen--Qwen3-4B-Instruct-2507")
    write_data(root / "data" / "retool" / "train.parquet", 512)
    write_data(root / "data" / "retool" / "val.parquet", 30)
    return root


@pytest.fixture(scope="session")
def composed_before() -> Callable[..., DictConfig]:
    """Hydra's `compose` that reads each recipe with each machine once: a third of a second each time."""
    made: dict[tuple[str, ...], bytes] = {}

    def compose(name: str, overrides: Sequence[str] = ()) -> DictConfig:
        key = (name, *overrides)
        if key not in made:
            made[key] = pickle.dumps(hydra.compose(name, overrides=list(overrides)))
        return pickle.loads(made[key])

    return compose


@pytest.fixture
def full_root(
    data_root_template: Path,
    composed_before: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A data root with everything that a run of the recipe needs, in an environment that sets nothing else."""
    clean_environment(monkeypatch)
    monkeypatch.setattr("verl_ext.compose.hydra_compose", composed_before)
    root = tmp_path / "root"
    shutil.copytree(data_root_template, root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_EXT_DATA_ROOT", str(root))
    return root


def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the developer's settings, and nothing that preflight would complain of."""
    foreign = ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_ENDPOINT", "CXX",
               "TORCH_INDUCTOR_INSTALL_GXX")  # fmt: skip
    ours = [name for name in os.environ if name.startswith(("VERL_EXT_", "E2B_"))]
    for name in (*ours, *foreign, "WANDB_API_KEY", "CUDA_COMPAT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_complaint_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many GPUs of the right kind as wanted, room for everything, and what passes for a C++ compiler."""
    from verl_ext.preflight import compiler, machine, subject

    monkeypatch.setattr(subject, "visible_gpus", lambda: [machine_gpu(index) for index in range(8)])
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1_000_000, 1_000_000))
    usage = shutil._ntuple_diskusage(10**13, 0, 10**13)  # type: ignore[attr-defined]
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(machine, "memory_available_gib", lambda: 1000.0)
    monkeypatch.setattr(machine.psutil, "process_iter", lambda _: [])
    monkeypatch.setattr(machine, "installed", lambda: {"flash-attn": "2.8.3", "liger-kernel": "0.6.4"})
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(compiler, "header", lambda: Path(__file__))


def machine_gpu(index: int, memory_gib: float = 140.4, used_gib: float = 0.1, name: str = "NVIDIA H200"):
    """A GPU as nvidia-smi would show it."""
    from verl_ext.gpus import Gpu

    return Gpu(index, name, memory_gib, used_gib)


@pytest.fixture
def make_model() -> Callable[..., Path]:
    """`write_model`."""
    return write_model


@pytest.fixture
def make_data() -> Callable[..., Path]:
    """`write_data`."""
    return write_data


@pytest.fixture
def make_gpu() -> Callable[..., object]:
    """`machine_gpu`."""
    return machine_gpu
