"""verl_ext.lost on verl's own batches: lost trajectories again, or out, or the end of the run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from verl_ext.agent_loop.loop import RECORD_FIELD
    from verl_ext.lost import (
        Lost,
        LostPolicy,
        check_not_too_many,
        lost_left_out,
        replace_rows,
        roll_out,
        wait_until_it_works,
    )

from verl_ext.errors import SandboxUnavailableError
from verl_ext.trajectory import LoopRecord

STOP, PAUSE = LostPolicy(0.25, False, 60, 2), LostPolicy(0.25, True, 60, 2)


def objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def prompts(count: int, *, validate: bool = False) -> DataProto:
    numbers = {"number": torch.arange(count).unsqueeze(1)}
    made = DataProto.from_dict(tensors=numbers, non_tensors={"uid": objects([f"u{n}" for n in range(count)])})
    made.meta_info = {"validate": validate, "global_steps": 5}
    return made


class Service:
    """Makes a batch of what it is asked for; `lost` says which numbers are lost at the n-th asking."""

    def __init__(self, *lost: set[int]) -> None:
        self.lost = list(lost)
        self.asked: list[list[int]] = []
        self.pauses: list[str] = []
        self.comes_back = True

    def generate(self, asked: DataProto) -> DataProto:
        numbers = asked.batch["number"].flatten().tolist()
        self.asked.append(numbers)
        lost = self.lost.pop(0) if self.lost else set()
        records = [
            LoopRecord(f"t{n}", infra_error="SandboxUnavailableError: 502" if n in lost else "") for n in numbers
        ]
        mask = torch.tensor([[0, 0] if n in lost else [1, 1] for n in numbers])
        # The width of a column of texts differs from batch to batch.
        words = np.array(["x" * (n + 1) for n in numbers])
        tensors = {"response_mask": mask, "value": torch.tensor([[float(n)] for n in numbers])}
        columns = {RECORD_FIELD: objects([record.to_json() for record in records]), "verdict": words}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def wait(self, cause: str) -> bool:
        self.pauses.append(cause)
        return self.comes_back

    def roll_out(self, asked: DataProto, policy: LostPolicy, workers: int = 1) -> tuple[DataProto, Lost, int]:
        return roll_out(asked, self.generate, policy=policy, workers=workers, wait_for_service=self.wait)


def test_a_batch_without_loss_is_made_once():
    service = Service()
    output, lost, retried = service.roll_out(prompts(4), PAUSE)
    assert (service.asked, lost.rows, lost.cause, retried) == ([[0, 1, 2, 3]], [], "", 0)
    assert len(output) == 4


def test_a_few_lost_of_a_training_batch_stay_masked():
    service = Service({2})
    output, lost, retried = service.roll_out(prompts(4), PAUSE)
    assert (len(service.asked), lost.rows, lost.ratio, retried) == (1, [2], 0.25, 0)
    assert output.batch["response_mask"].any(dim=1).tolist() == [True, True, False, True]
    check_not_too_many(lost, 5, PAUSE)


def test_too_many_lost_of_a_training_batch_pause_and_come_again_in_their_rows():
    service = Service({1, 2, 3}, {2})
    output, lost, retried = service.roll_out(prompts(4), PAUSE, workers=2)
    assert service.pauses == ["SandboxUnavailableError: 502"]
    assert service.asked == [[0, 1, 2, 3], [1, 2, 3, 1]], "a multiple of the workers is asked for"
    assert (lost.rows, retried) == ([2], 3)
    assert output.batch["value"].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert output.non_tensor_batch["verdict"].tolist() == ["x", "xx", "xxx", "xxxx"]
    assert output.batch["response_mask"].any(dim=1).tolist() == [True, True, False, True]


def test_too_many_lost_end_the_run_with_the_cause_where_it_is_to_stop():
    service = Service({0, 1})
    _, lost, _ = service.roll_out(prompts(4), STOP)
    assert not service.pauses
    with pytest.raises(SandboxUnavailableError, match=r"2 of 4 trajectories of step 5.*max_lost_ratio 0\.25.*502"):
        check_not_too_many(lost, 5, STOP)


def test_a_service_that_works_for_the_probe_alone_ends_the_run_in_the_end():
    service = Service(*[{0, 1, 2, 3}] * 9)
    _, lost, _ = service.roll_out(prompts(4), PAUSE)
    assert (len(service.asked), len(service.pauses)) == (4, 3)
    with pytest.raises(SandboxUnavailableError, match="4 of 4"):
        check_not_too_many(lost, 5, PAUSE)


def test_a_service_that_does_not_come_back_ends_the_run_too():
    service = Service({0, 1, 2, 3})
    service.comes_back = False
    _, lost, retried = service.roll_out(prompts(4), PAUSE)
    assert (service.pauses, retried) == (["SandboxUnavailableError: 502"], 0)
    with pytest.raises(SandboxUnavailableError, match="4 of 4"):
        check_not_too_many(lost, 5, PAUSE)


def test_a_batch_that_is_all_lost_is_never_trained_on_whatever_the_ratio():
    lost = Lost([0], 1, "x")
    with pytest.raises(SandboxUnavailableError, match="1 of 1"):
        check_not_too_many(lost, 5, LostPolicy(1.0, False, 60, 2))


def test_a_validation_is_made_again_for_each_that_is_lost_and_goes_on_without_the_rest():
    service = Service({0, 1, 2, 3}, {1, 2}, {2})
    _, lost, retried = service.roll_out(prompts(4, validate=True), STOP)
    assert service.asked == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2]]
    assert (lost.rows, retried, service.pauses) == ([2], 6, [])


def test_a_validation_that_is_all_lost_ends_after_its_tries():
    service = Service(*[{0, 1}] * 9)
    output, lost, _ = service.roll_out(prompts(2, validate=True), STOP)
    assert (len(service.asked), lost.rows, len(output)) == (3, [0, 1], 2)


def test_rows_are_put_back_where_they_belong():
    service = Service()
    output, other = service.generate(prompts(3)), service.generate(prompts(2))
    replace_rows(output, [2, 0], other)
    assert output.batch["value"].flatten().tolist() == [1.0, 1.0, 0.0]
    assert output.non_tensor_batch["verdict"].tolist() == ["xx", "xx", "x"]


# --- the pause


def test_a_pause_asks_until_the_service_works_and_says_so():
    answers, said = ["down", "down", ""], []
    assert wait_until_it_works(lambda: answers.pop(0), said.append, cause="502", timeout_s=60, every_s=0)
    assert said == ["paused: 502", "still paused: down", "still paused: down", "the sandbox service works again"]


def test_a_pause_has_an_end():
    said: list[str] = []
    assert not wait_until_it_works(lambda: "down", said.append, cause="502", timeout_s=0.01, every_s=0.02)
    assert "did not come back within 0.01 s: down" in said[-1]


# --- the curves of a validation


def test_verls_own_curves_count_lost_samples_as_wrong():
    # The fault: a validation knows no mask. When this fails, verl leaves masked samples out itself.
    source = inspect.getsource(RayPPOTrainer._validate)
    assert "process_validation_metrics(data_sources, sample_uids, reward_extra_infos_dict)" in source
    assert "response_mask" not in source


def test_lost_samples_are_in_no_curve():
    sources, uids = np.array(["m"] * 4), ["a", "a", "b", "b"]
    infos = {"reward": [1.0, 0.0, 1.0, 0.0], "acc": [1.0, 0.0, 1.0, 0.0], "empty": []}
    whole = process_validation_metrics(sources, uids, {"reward": infos["reward"], "acc": infos["acc"]})
    assert whole["m"]["acc"]["mean@2"] == 0.5
    lost = [False, True, False, True]
    found = lost_left_out(lost, process_validation_metrics)(sources, uids, infos)
    assert found["m"]["acc"]["mean@1"] == 1.0
    assert lost == [], "the next validation begins anew"


def test_a_validation_without_one_valid_sample_has_no_curve_and_does_not_die():
    found = lost_left_out([True, True], process_validation_metrics)(
        np.array(["m", "m"]), ["a", "b"], {"reward": [0.0, 0.0]}
    )
    assert found == {}


def test_samples_that_are_not_ours_are_verls():
    infos = {"reward": [1.0, 0.0]}
    found = lost_left_out([True], process_validation_metrics)(np.array(["m", "m"]), ["a", "a"], infos)
    assert found["m"]["reward"]["mean@2"] == 0.5
