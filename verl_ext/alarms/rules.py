"""The alarms: what each watches, when it starts and ends, what is then wrong, and what to do. One table.

A threshold whose Source is "ours" is a judgement, set so that the stored steps of healthy runs
(tests/data/healthy_metrics.jsonl, and the runs of recipe/retool/LOG.md) stay clear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_ext.alarms.gauges import (
    BelowBest,
    Gauge,
    Level,
    SinceBest,
    Step,
    ToNormal,
    ToStart,
    counted,
    not_finite,
    number,
    of,
    share,
    tokens_per_s,
)

LEAST_CALLS = 20  # calls of a step below which a share of them says nothing


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Attributes:
        name: for `--stop-on`, logs and alarms.jsonl.
        what: what the number is.
        gauge: makes what measures it, for one run.
        start: the alarm starts beyond this number.
        end: it ends when the number is back at this or better. Between the two it stays as it is.
        cause: what is likely wrong.
        cure: what to do.
        source: where the thresholds come from.
        steps: how many in a row it takes, to start and to end.
        below: whether beyond means below.
    """

    name: str
    what: str
    gauge: Callable[[], Gauge]
    start: float
    end: float
    cause: str
    cure: str
    source: str
    steps: int = 3
    below: bool = False

    def starts(self, value: float) -> bool:
        """Whether the number is beyond `start`."""
        return value < self.start if self.below else value > self.start

    def ends(self, value: float) -> bool:
        """Whether the number is back at `end` or better."""
        return value >= self.end if self.below else value <= self.end

    @property
    def condition(self) -> str:
        """When it starts, for people."""
        steps = "at one step" if self.steps == 1 else f"{self.steps} steps in a row"
        return f"{'below' if self.below else 'above'} {self.start:g}, {steps}"

    @property
    def way_back(self) -> str:
        """When it ends, for people."""
        return "0" if self.end == 0 else f"{self.end:g} or {'more' if self.below else 'less'}"


def _advantages(step: Step) -> float | None:
    """Distance between the greatest and the least advantage of the batch."""
    high, low = number(step, "critic/advantages/max"), number(step, "critic/advantages/min")
    return None if high is None or low is None else high - low


_DAPO = "arXiv:2503.14476"
RULES: tuple[Rule, ...] = (
    Rule(
        "tools-never-called",
        "share of trajectories that call the tool",
        lambda: Level(of("agent/tool_use_ratio")),
        start=0.01,
        end=0.05,
        below=True,
        cause="the model does not know of its tool, or has unlearned it",
        cure="read a prompt in rollouts/: the tool's schema must be in it (chat-template); a base model needs a cold "
        "start on traces with calls, or a prompt that asks for code",
        source="ours",
    ),
    Rule(
        "parse-failures",
        "share of tool calls that could not be read or named no tool",
        lambda: Level(counted("agent/parse_failure_ratio", "agent/tool_calls", LEAST_CALLS)),
        start=0.25,
        end=0.15,
        cause="the model writes calls in another form than multi_turn.format, or its policy falls apart",
        cure="read such a call in rollouts/ (status malformed, unknown_tool, bad_arguments); set multi_turn.format to "
        "the form that the model was tuned on; if the share grew, go back a checkpoint and lower actor.optim.lr",
        source="ours; a healthy smoke run stays below 0.09",
    ),
    Rule(
        "tool-errors",
        "share of executed calls that ended in an error or a time-out",
        lambda: Level(counted("agent/tool_error_ratio", "agent/tool_calls", LEAST_CALLS)),
        start=0.5,
        end=0.4,
        cause="the model's code fails: packages that the sandbox lacks, state that it takes for kept, calls that are "
        "too long",
        cure="read the tracebacks in rollouts/; invoke check-sandbox lists the packages; call_timeout_s is in "
        "config/tool/code_interpreter.yaml",
        source="ours",
    ),
    Rule(
        "infra-failures",
        "share of trajectories that our sandboxes lost",
        lambda: Level(share("agent/infra_failed", "agent/trajectories")),
        start=0.02,
        end=0.0,
        steps=2,
        cause="the sandbox service refuses, fails or is too slow; these trajectories are masked, so the batch shrinks",
        cure="invoke check-sandbox; logs/ has the service's errors by cause, sandbox/failures/... counts them; lower "
        "VERL_EXT_SANDBOX_MAX_ALIVE or _CREATE_RATE_PER_S to what the account gives",
        source="ours; above verl_ext.max_lost_ratio the run pauses or stops by itself",
    ),
    Rule(
        "no-signal",
        "greatest advantage of the batch less its least",
        lambda: Level(_advantages),
        start=1e-6,
        end=1e-6,
        steps=2,
        below=True,
        cause="in every group all trajectories earn the same, so nothing is trained",
        cure="take questions of another difficulty, raise rollout.n, or see in rollouts/ whether the grader gives "
        "everything the same verdict",
        source=f"{_DAPO} section 3.2: a group with one reward has no gradient",
    ),
    Rule(
        "reward-flat",
        "steps since the mean reward of 5 steps rose by more than 0.01, at an accuracy below 0.9",
        lambda: SinceBest(of("agent/reward_mean"), gain=0.01, done=of("agent/accuracy"), enough=0.9),
        start=40,
        end=0,
        steps=1,
        cause="nothing more is learned: learning rate, too few mini-batches, questions too hard or too easy, or "
        "weights that do not reach the engine",
        cure="look at probability-difference and no-signal first; then at the share of groups that are all right or "
        "all wrong, and at entropy; raise actor.optim.lr only after that",
        source="ours",
    ),
    Rule(
        "reward-collapsed",
        "mean reward of 5 steps below the best such mean, as a share of the reward's range",
        lambda: BelowBest(of("agent/reward_mean"), "critic/score/min", "critic/score/max"),
        start=0.15,
        end=0.05,
        cause="the policy falls apart, or the sandbox answers wrongly",
        cure="go back to a checkpoint of before; lower actor.optim.lr; look at grad-norm, probability-difference and "
        "truncation of the steps before, and at tool answers in rollouts/",
        source="ours; a healthy smoke run stays below 0.01",
    ),
    Rule(
        "entropy-collapse",
        "entropy over that of the first 3 steps (0.1 nats at least)",
        lambda: ToStart(of("actor/entropy"), floor=0.1),
        start=0.1,
        end=0.2,
        below=True,
        cause="the policy has become nearly deterministic: the trajectories of a group are copies, and nothing is "
        "explored any more",
        cure="raise actor.clip_ratio_high, keep rollout.temperature at 1.0, lower actor.optim.lr; an entropy bonus "
        "(actor.entropy_coeff) is the last resort",
        source=f"{_DAPO} section 3.1 for the sign; the threshold is ours: a healthy smoke run stays above 0.3",
    ),
    Rule(
        "length-explosion",
        "response tokens over the median of the last 20 normal steps",
        lambda: ToNormal(of("agent/response_tokens")),
        start=2.0,
        end=1.5,
        cause="the model has found that length pays, or no longer ends its turns",
        cure="read the longest trajectories in rollouts/: repetition is a policy that falls apart (go back a "
        "checkpoint), long reasoning may be wanted (raise data.max_response_length)",
        source="ours; a healthy smoke run stays below 1.3",
    ),
    Rule(
        "truncation",
        "share of trajectories cut at max_response_length",
        lambda: Level(of("agent/truncated_ratio")),
        start=0.2,
        end=0.1,
        cause="data.max_response_length is too short for what the model writes; right reasoning is rewarded as wrong",
        cure="raise data.max_response_length (invoke train --dry-run says whether it fits), or see length-explosion",
        source=f"{_DAPO} section 3.4 for the sign; the threshold is ours: a healthy smoke run stays below 0.1",
    ),
    Rule(
        "probability-difference",
        "mean difference between the engine's and the trainer's probability of the sampled tokens",
        lambda: Level(of("training/rollout_probs_diff_mean")),
        start=0.01,
        end=0.005,
        steps=2,
        cause="the policy that generates is not the one that is trained: weights not synced, or kernels that compute "
        "something else",
        cure="leave rollout.free_cache_engine on; on A100, L20 and B200 set rollout.engine_kwargs.vllm."
        "disable_cascade_attn=true; no quantised weights in the engine",
        source="verl v0.6.1 docs/faq: below 0.005 is good, above 0.01 is bad",
    ),
    Rule(
        "grad-norm",
        "gradient norm before clipping over the median of the last 20 normal steps",
        lambda: ToNormal(of("actor/grad_norm")),
        start=10.0,
        end=5.0,
        steps=2,
        cause="an update that is far too large: one odd batch, or a policy that falls apart",
        cure="once is harmless (actor.grad_clip cuts it); if it stays, go back a checkpoint and lower actor.optim.lr",
        source="ours; a healthy smoke run stays below 3",
    ),
    Rule(
        "not-finite",
        "how many of loss, gradient norm and entropy are NaN or infinite",
        lambda: Level(not_finite("actor/pg_loss", "actor/grad_norm", "actor/entropy")),
        start=0,
        end=0,
        steps=1,
        cause="numbers overflowed; verl 0.6.1 leaves out an update whose gradient norm is not finite, so nothing is "
        "trained while this stays",
        cure="go back to a checkpoint of before; lower actor.optim.lr; see whether the model was loaded in float16",
        source="verl 0.6.1 workers/actor/dp_actor.py _optimizer_step",
    ),
    Rule(
        "sandbox-waiting",
        "share of the sandbox sessions' time that was spent waiting for a place",
        lambda: Level(of("sandbox/waiting_share")),
        start=0.5,
        end=0.3,
        cause="fewer sandboxes are allowed than trajectories want at once",
        cure="VERL_EXT_SANDBOX_MODE=context lets several trajectories share one; raise VERL_EXT_SANDBOX_MAX_ALIVE if "
        "the account gives more; invoke check-sandbox measures it",
        source="ours",
    ),
    Rule(
        "throughput-drop",
        "tokens per second over the median of the last 20 normal steps, validation and checkpoints not counted",
        lambda: ToNormal(tokens_per_s),
        start=0.5,
        end=0.7,
        below=True,
        cause="something else takes the machine, the sandboxes have become slow, or a few trajectories hold up all",
        cure="compare timing_s/gen, timing_s/update_actor and sandbox/acquire_s/p95 with earlier steps: the one that "
        "grew says where; invoke doctor looks at the machine",
        source="ours; a healthy smoke run stays above 0.9",
    ),
)
NAMES = tuple(rule.name for rule in RULES)
