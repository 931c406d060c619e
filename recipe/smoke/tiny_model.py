"""A language model small enough to train on two CPU cores, taught to call a tool in about a minute.

Qwen3's architecture, its own byte-level BPE with single digits, and its own chat template in the hermes
tool format. Supervised training on two habits: answering at once with a guess, and asking the tool; see
`recipe.smoke.arithmetic`. The result is an ordinary Hugging Face folder, cached under a name that is a
hash of everything that made it.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.retool.questions import INSTRUCTION
from recipe.smoke.arithmetic import Problem, draw
from verl_ext.agent_loop.chat import ChatSegments

if TYPE_CHECKING:
    import torch

Message = dict[str, str]

# Hermes tool format as in Qwen3's own template, but a tool is only named, not described: with its JSON schema
# in the prompt (72 more tokens) the model had not learned to copy a number after 320 steps, without it after
# 100. Source of the format: Qwen/Qwen3-4B-Instruct-2507 tokenizer_config.json.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '<tools>' }}{%- for tool in tools %}
{{- '\\n' + tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class TinyModelPlan:
    """Everything that decides what the tiny model is; hashed into the name of its folder.

    Attributes:
        max_skill_steps, exact_enough: the first part, in which every conversation asks the tool, ends when this
            share of replies is exact. Copying is learned suddenly, after 80 to 200 steps by seed, so a fixed
            number of steps would be too few or too many; a rate that falls before that puts it off.
        settle_steps: the rate falls to a tenth, which makes the copying exact.
        habit_steps, tool_habit: then only this share of the conversations ask the tool, the others answer
            hastily. It is also how often the model will ask before any reinforcement learning.
    """

    hidden_size: int = 128
    layers: int = 3
    vocabulary: int = 640
    max_skill_steps: int = 400
    exact_enough: float = 0.9
    settle_steps: int = 60
    habit_steps: int = 50
    batch: int = 40
    learning_rate: float = 2e-3
    tool_habit: float = 0.3
    max_position_embeddings: int = 8192
    seed: int = 0
    instruction: str = INSTRUCTION
    tools: str = "[]"


def folder_for(cache_dir: Path, tools: Sequence[dict[str, Any]]) -> Path:
    """Where the tiny model for these tools is or will be: a name made of a hash of the plan and of this file."""
    made_by = Path(__file__).read_bytes() + json.dumps(asdict(_plan(tools)), sort_keys=True).encode()
    return cache_dir / f"tiny-qwen3-{hashlib.sha256(made_by).hexdigest()[:12]}"


def ensure(cache_dir: Path, scratch: Path, tools: Sequence[dict[str, Any]], report: Callable[[str], None]) -> Path:
    """The folder of the tiny model, made if it is not in the cache; it appears whole or not at all.

    Args:
        cache_dir: where models are kept.
        scratch: a folder beside it that is not there yet; the caller removes what a killed process leaves.
        tools: the tool schemas, in OpenAI's form, as the agent loop gives them to the chat template.
        report: called with lines of progress.

    Returns:
        A Hugging Face folder: bfloat16 weights, tokenizer, chat template.
    """
    folder = folder_for(cache_dir, tools)
    if (folder / "config.json").is_file():
        return folder
    scratch.mkdir(parents=True)
    make(scratch, _plan(tools), report)
    if not folder.exists():
        scratch.rename(folder)
    return folder


def _plan(tools: Sequence[dict[str, Any]]) -> TinyModelPlan:
    return TinyModelPlan(tools=json.dumps(list(tools), sort_keys=True))


def make(folder: Path, plan: TinyModelPlan, report: Callable[[str], None]) -> float:
    """Train the tiny model and save it to `folder`; returns the share of exact replies (see `_exactness`)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    started = time.monotonic()
    torch.manual_seed(plan.seed)
    rng = random.Random(plan.seed)
    tools = json.loads(plan.tools)
    tokenizer = _tokenizer(plan, tools, rng)
    chat = ChatSegments(tokenizer, tools)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden_size,
        intermediate_size=3 * plan.hidden_size,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.hidden_size // 32,
        num_key_value_heads=plan.hidden_size // 64,
        head_dim=32,
        max_position_embeddings=plan.max_position_embeddings,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    report(f"tiny model: {parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens, supervised cold start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    def step(rate: float, tool_share: float) -> None:
        optimizer.param_groups[0]["lr"] = plan.learning_rate * rate
        conversations = [_conversation(draw(rng), rng, plan.instruction, tool_share) for _ in range(plan.batch)]
        loss = model(**_batch(conversations, tokenizer, chat)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    probe = [_conversation(draw(rng), rng, plan.instruction, 1.0) for _ in range(96)]
    exact, done = 0.0, 0
    while exact < plan.exact_enough and done < plan.max_skill_steps:
        for _ in range(20):
            done += 1
            step(min(1.0, done / 30), 1.0)
        exact = _exactness(model, probe, tokenizer, chat)
        report(f"tiny model: {done} steps, {exact:.0%} of replies exact, {time.monotonic() - started:.0f} s")
    for index in range(plan.settle_steps):
        step(1.0 - 0.9 * (index + 1) / plan.settle_steps, 1.0)
    for _ in range(plan.habit_steps):
        step(0.1, plan.tool_habit)
    exact = _exactness(model, probe, tokenizer, chat)
    report(f"tiny model: done, {exact:.0%} of replies exact, {time.monotonic() - started:.0f} s")
    model.to(torch.bfloat16).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return exact


def _exactness(model: Any, conversations: list[list[Message]], tokenizer: Any, chat: ChatSegments) -> float:
    """Share of the conversations whose every reply token is the model's first choice, given those before it.

    The first token of each conversation's first reply is left out: it is the choice between the habits.
    """
    import torch

    batch = _batch(conversations, tokenizer, chat)
    with torch.no_grad():
        choice_BT = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)[
            :, :-1
        ]
    label_BT = batch["labels"][:, 1:].clone()
    first = (label_BT != -100).float().argmax(-1)
    label_BT[torch.arange(len(first)), first] = -100
    return float(((choice_BT == label_BT) | (label_BT == -100)).all(-1).float().mean())


def user_message(problem: Problem, instruction: str) -> Message:
    """The question as `prepare-data` phrases it."""
    return {"role": "user", "content": f"{problem.question}\n\n{instruction}" if instruction else problem.question}


def tool_call_text(problem: Problem) -> str:
    """The assistant's turn that asks the tool, in hermes form."""
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": problem.expression}})
    return f"<tool_call>\n{call}\n</tool_call>"


def answer_text(answer: int) -> str:
    """The assistant's last turn."""
    return f"The answer is \\boxed{{{answer}}}."


def _conversation(problem: Problem, rng: random.Random, instruction: str, tool_share: float) -> list[Message]:
    question = user_message(problem, instruction)
    if rng.random() >= tool_share:
        # A hasty answer, always wrong. Not a random number: learning to make numbers up undoes the copying that
        # the other habit needs (exact answers fell from 97 % to 58 %), learning to copy another number does not.
        return [question, {"role": "assistant", "content": answer_text(problem.left)}]
    return [
        question,
        {"role": "assistant", "content": tool_call_text(problem)},
        {"role": "tool", "content": str(problem.answer)},
        {"role": "assistant", "content": answer_text(problem.answer)},
    ]


def _tokenizer(plan: TinyModelPlan, tools: list[dict[str, Any]], rng: random.Random) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        # Without the usual split into words a fixed phrase becomes one token: a conversation then has 35 tokens
        # instead of 126, and copying a number, the one skill that is asked for, is learned in a quarter of the steps.
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    corpus = ["".join(m["content"] for m in _conversation(draw(rng), rng, plan.instruction, 0.7)) for _ in range(1000)]
    names = " ".join(tool["function"]["name"] for tool in tools)
    corpus += [f"{plan.instruction}<tools>\n{names}(code)\n</tools>\n<tool_response>\n</tool_response>\n"] * 50
    corpus += ["system\n", "user\n", "assistant\n"] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, **tokens)


def _batch(conversations: list[list[Message]], tokenizer: Any, chat: ChatSegments) -> dict[str, torch.Tensor]:
    """Token ids and labels, int64 (B, T), right-padded; labels are -100 except on the assistant's own tokens."""
    import torch

    rows = [_tokens_and_labels(conversation, tokenizer, chat) for conversation in conversations]
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), width), tokenizer.pad_token_id, dtype=torch.long)
    labels_BT = torch.full((len(rows), width), -100, dtype=torch.long)
    attention_BT = torch.zeros((len(rows), width), dtype=torch.long)
    for row, (ids, labels) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor(labels)
        attention_BT[row, : len(ids)] = 1
    return {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": attention_BT}


def _tokens_and_labels(conversation: list[Message], tokenizer: Any, chat: ChatSegments) -> tuple[list[int], list[int]]:
    """The conversation as the agent loop will build it, turn by turn: a rendered whole is tokenised otherwise."""
    ids: list[int] = []
    labels: list[int] = []
    for position, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        context = chat.segment([conversation[position - 1]]) if ids else chat.prompt(conversation[:position])
        reply = [*tokenizer.encode(message["content"], add_special_tokens=False), chat.turn_end_id]
        ids += context + reply
        labels += [-100] * len(context) + reply
    return ids, labels


def main(arguments: Sequence[str]) -> int:
    """`python -m recipe.smoke.tiny_model CACHE_DIR SCRATCH TOOLS_JSON`: make the model, say how it goes."""

    def report(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    ensure(Path(arguments[0]), Path(arguments[1]), json.loads(arguments[2]), report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
