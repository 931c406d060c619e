"""What a Hugging Face folder says of its model, read without transformers: sizes, parameters, files that miss.

`config.json` gives the sizes; the headers of the safetensors files give the exact number of parameters.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

INDEX = "model.safetensors.index.json"
# A pointer that `git clone` leaves in place of a large file when git-lfs is not installed.
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes, as config.json names them.

    Attributes:
        parameters: counted in the weights, or by `dense_parameters` where there are none yet; 0 if neither is
            possible (a mixture of experts without weights).
        max_positions: the longest context it was made for; 0 if it says none.
    """

    model_type: str
    hidden_size: int
    layers: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    parameters: int

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the output layer where it has weights of its own."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        return max(self.parameters - self.embedding_parameters, 0) // self.layers

    @property
    def key_value_bytes(self) -> int:
        """Of one token in the engine's cache, bfloat16, all layers, before tensor parallelism."""
        return 2 * 2 * self.layers * self.key_value_heads * self.head_dim


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder.

    Raises:
        ConfigurationError: config.json is not there, is no JSON, or has not the sizes of a decoder.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        heads = int(text["num_attention_heads"])
        shape = ModelShape(
            model_type=str(config.get("model_type", "")),
            hidden_size=int(text["hidden_size"]),
            layers=int(text["num_hidden_layers"]),
            attention_heads=heads,
            key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            intermediate_size=int(text["intermediate_size"]),
            vocab_size=int(text["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_positions=int(text.get("max_position_embeddings") or 0),
            parameters=0,
        )
        experts = any(name in text for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"no model in {folder}: it has no config.json") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ConfigurationError(f"{path} describes no decoder that can be read ({error!r})") from error
    counted = sum(_parameters(file) for file in sorted(folder.glob("*.safetensors")))
    return replace(shape, parameters=counted or (0 if experts else dense_parameters(shape)))


def dense_parameters(shape: ModelShape) -> int:
    """Parameters of a dense decoder of the Llama and Qwen kind, biases and norms left out (under 0.1 %)."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.attention_heads + shape.key_value_heads)
    return shape.embedding_parameters + shape.layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def _parameters(path: Path) -> int:
    """Parameters in one safetensors file, by its header; 0 if it has none.

    Source: the format's description: 8 bytes with the header's length, little-endian, then JSON.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 100_000_000:
                return 0
            header: dict[str, Any] = json.loads(file.read(length))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, struct.error, KeyError, TypeError):
        return 0


def weight_problems(folder: Path) -> Iterator[str]:
    """What of the model's files is missing or is no real file."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    named = _named_in_index(folder)
    for name in sorted(named - {path.name for path in weights}):
        yield f"{folder / name} is missing, though {INDEX} names it"
    if not weights and not named:
        yield f"{folder} has no weights (*.safetensors)"
    for path in weights:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                yield f"{path} is a pointer of git-lfs and not the weights"
    if not (folder / "tokenizer.json").is_file() and not any(folder.glob("tokenizer.model")):
        yield f"{folder} has no tokenizer (tokenizer.json)"


def _named_in_index(folder: Path) -> set[str]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
