"""How long a prompt is for the model: with the chat template and the tool's schema around it, as verl counts it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_ext.errors import ConfigurationError

TOOL_CONFIG = Path(__file__).with_name("config") / "tool" / "code_interpreter.yaml"
_BATCH = 1_024


class PromptCounter:
    """Counts the tokens of user messages.

    Args:
        model: a Hugging Face folder with a tokenizer and a chat template.
        tool_config: the tools that the model is told about, as verl reads them.
        advance: called with the number of prompts that were counted since the last call.

    Raises:
        ConfigurationError: no tokenizer or no chat template there.

    Source: verl 0.6.1 utils/dataset/rl_dataset.py `maybe_filter_out_long_prompts`, which counts the same at the start
    of each training.
    """

    def __init__(
        self, model: Path, tool_config: Path = TOOL_CONFIG, advance: Callable[[int], None] = lambda _: None
    ) -> None:
        from transformers import AutoTokenizer

        self._advance = advance
        self._tools = [
            entry["tool_schema"] for entry in yaml.safe_load(tool_config.read_text(encoding="utf-8"))["tools"]
        ]
        if not model.is_dir():
            raise ConfigurationError(f"no folder {model}: give --model a Hugging Face folder with a tokenizer.")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"no tokenizer in {model}: {error}. Give --model a folder that has one."
            ) from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigurationError(f"the tokenizer in {model} has no chat template: give an instruction-tuned model.")

    def __call__(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of each prompt, in order."""
        counts: list[int] = []
        for start in range(0, len(prompts), _BATCH):
            batch = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + _BATCH]]
            texts = self._tokenizer.apply_chat_template(
                batch, tools=self._tools, add_generation_prompt=True, tokenize=False
            )
            counts += map(len, self._tokenizer(texts, add_special_tokens=False)["input_ids"])
            self._advance(len(batch))
        return counts
