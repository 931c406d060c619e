"""Tokenizers that several folders need, and how hypothesis behaves here.

Skipped where the thing itself is missing: `qwen3` needs the real tokenizer in shared/tokenizer beside the
repository. Not covered by any test without a GPU: CUDA, more than one node, the real model's quality.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
QWEN3 = ROOT.parent / "shared" / "tokenizer" / "qwen3-4b-instruct-2507"
TEMPLATE = ROOT / "tests" / "data" / "qwen3_2507_chat_template.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# No deadline and the same examples every time: a shared machine must not make a test fail.
settings.register_profile("here", deadline=None, derandomize=True, database=None)
settings.load_profile("here")


def pytest_sessionstart() -> None:
    """No event loop belongs to the main thread between tests.

    Else pytest-asyncio 1.3 makes one before the first asynchronous test, the first `asyncio.run` of a test forgets it,
    and some later test fails when it is collected, as an open resource.
    """
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerBase]:
    """Makes a tokenizer with bytes as tokens, Qwen's chat marks as special ones, and any chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template: str | None = None, eos: str | None = "<|im_end|>") -> PreTrainedTokenizerBase:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=eos, pad_token="<|endoftext|>", chat_template=template
        )

    return make


@pytest.fixture(scope="session")
def byte_tokenizer(make_tokenizer) -> PreTrainedTokenizerBase:
    """Bytes as tokens under the chat template of Qwen3-4B-Instruct-2507."""
    return make_tokenizer(TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def qwen3() -> PreTrainedTokenizerBase:
    """The real tokenizer of Qwen3-4B-Instruct-2507."""
    if not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip("no shared/tokenizer beside the repository: the real Qwen3 tokenizer is not tried")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QWEN3)


@pytest.fixture(params=["byte_tokenizer", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Each of the two."""
    return request.getfixturevalue(request.param)
