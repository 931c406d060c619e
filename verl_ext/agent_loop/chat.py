"""Token ids of what the environment says, equal to what the full chat template would give.

verl 0.6.1 renders the tool messages alone and cuts off the length of a rendered `[{}]`; the newline that the
template puts after `<|im_end|>` is then lost at every boundary from assistant to tool (verl issue 6501).
Here the segment is the difference of two renderings of a conversation, so any template that only appends
is right by construction, and one that rewrites earlier turns is refused when the loop is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from verl_ext.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_REPLY, _THOUGHT = "reply", "<think>\nthought\n</think>\n\nreply"
_PROBE: Message = {"role": "tool", "content": "probe"}


class ChatSegments:
    """Renders first prompts and later environment segments for one tokenizer and one set of tools.

    Args:
        tokenizer: has a chat template; its `eos_token` ends an assistant turn.
        tool_schemas: OpenAI-style schemas, as the template takes them.
        template_kwargs: verl's `data.apply_chat_template_kwargs`.

    Raises:
        ConfigurationError: there is no template, or it is not append-only, or an assistant turn does not end
            with the tokenizer's eos token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_schemas: Sequence[Message],
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools: list[Any] | None = list(tool_schemas) or None
        self._template_kwargs = dict(template_kwargs or {})
        if not tokenizer.chat_template:
            raise ConfigurationError("the tokenizer has no chat template: use an instruct model, or set chat_template")
        eos = tokenizer.eos_token
        if not isinstance(eos, str) or not isinstance(tokenizer.eos_token_id, int):
            raise ConfigurationError("the tokenizer has no eos token, so no turn would ever end: set eos_token")
        self.turn_end_id: int = tokenizer.eos_token_id
        self._stem_messages = _stem(_REPLY)
        self._stem = self._render(self._stem_messages, add_generation_prompt=False)
        cut = self._stem.rfind(eos)
        if cut == -1 or self._stem[cut + len(eos) :].strip():
            raise ConfigurationError(
                f"the chat template does not end an assistant turn with the tokenizer's eos token {eos!r}: "
                "generation would not stop where a turn ends; set the tokenizer's eos_token to the turn's end"
            )
        self._after_turn = cut + len(eos)
        self.segment([_PROBE])
        self._refuse_loss_of_thinking()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first prompt: the messages, the tools, and the opening of the assistant's turn."""
        return self._encode(self._render(messages, add_generation_prompt=True))

    def segment(self, messages: Sequence[Message], *, turn_is_closed: bool = True) -> list[int]:
        """Ids from the end of an assistant turn to the opening of the next one, around `messages`.

        Args:
            messages: what the environment says, usually tool messages.
            turn_is_closed: whether the sampled turn ends with the eos token; if not, it is put in front.
        """
        whole = self._render([*self._stem_messages, *messages], add_generation_prompt=True)
        if not whole.startswith(self._stem[: self._after_turn]):
            raise _rewrites_turns()
        ids = self._encode(whole[self._after_turn :])
        return ids if turn_is_closed else [self.turn_end_id, *ids]

    def _refuse_loss_of_thinking(self) -> None:
        stem = _stem(_THOUGHT)
        alone = self._render(stem, add_generation_prompt=False).rstrip()
        if _THOUGHT not in alone or not self._render([*stem, _PROBE], add_generation_prompt=True).startswith(alone):
            raise _rewrites_turns()

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except TemplateError as error:
            raise ConfigurationError(
                f"the chat template refuses a conversation with a tool ({error}): use one with tool messages"
            ) from error
        assert isinstance(text, str)  # noqa: S101 - tokenize=False gives text
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _stem(reply: str) -> list[Message]:
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": reply}]


def _rewrites_turns() -> ConfigurationError:
    return ConfigurationError(
        "the chat template changes earlier turns when later ones are added (as templates that drop thinking do), "
        "so sampled tokens would not be what the model is trained on: use another template"
    )
