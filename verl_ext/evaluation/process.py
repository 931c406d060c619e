"""The Ray process of an evaluation: stands where a training's runner does."""

from __future__ import annotations

from typing import Any, ClassVar


class EvaluationRunnerProcess:
    """See `verl_ext.ray_run.RunnerProcess`. Heavy imports happen in it and not in the driver.

    Its name ends like that one's, by which the driver tells a run's first process from its others.
    """

    engine_has_own_gpus: ClassVar[bool] = True

    def run(self, config: Any, agent_loops: list[Any], engine_servers: dict[str, list[Any]]) -> None:
        """Take what is left of the evaluation from one model; returns when all of it is kept."""
        from verl_ext.evaluation.rollout import Evaluator

        Evaluator(agent_loops, engine_servers).run(config)
