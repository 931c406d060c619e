"""verl_ext.advantage against verl's own GRPO."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    from verl.protocol import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from verl_ext.advantage import NAME, grpo_without_lost


def batch(rewards: list[list[float | None]], length: int = 6) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Token rewards, mask and groups; None is a lost trajectory, whose reward of 0.0 must count nowhere."""
    flat = [reward for group in rewards for reward in group]
    mask = torch.zeros(len(flat), length, dtype=torch.long)
    scores = torch.zeros(len(flat), length)
    for row, reward in enumerate(flat):
        if reward is not None:
            mask[row, : 2 + row % (length - 2)] = 1
            mask[row, 1] = 0  # the environment's
            scores[row, 1 + row % (length - 2)] = reward
    groups = [f"g{number}" for number, group in enumerate(rewards) for _ in group]
    return scores, mask, np.array(groups, dtype=object)


def per_row(advantages: torch.Tensor, mask: torch.Tensor) -> list[float]:
    assert torch.equal(advantages == 0, (mask == 0) | (advantages.abs().amax(dim=1, keepdim=True) == 0))
    return [float(row[kept.bool()][0]) if kept.any() else 0.0 for row, kept in zip(advantages, mask, strict=True)]


def test_verl_finds_it_by_name():
    assert get_adv_estimator_fn(NAME) is grpo_without_lost


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_verls_to_the_bit_when_nothing_is_lost(seed: int, normalise: bool):
    rng = np.random.default_rng(seed)
    scores, mask, groups = batch([rng.choice([-1.0, -0.9, 1.0, 0.3], size=8).tolist() for _ in range(7)])
    order = rng.permutation(len(groups))  # verl reorders a batch to balance it
    scores, mask, groups = scores[order], mask[order], groups[order]
    ours, returns = grpo_without_lost(scores, mask, groups, config=AlgoConfig(norm_adv_by_std_in_grpo=normalise))
    theirs, _ = compute_grpo_outcome_advantage(scores.clone(), mask, groups, norm_adv_by_std_in_grpo=normalise)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, returns)


def test_a_lost_row_moves_neither_mean_nor_deviation():
    with_lost, mask, groups = batch([[1.0, None, -1.0, 1.0, None], [1.0, -1.0]])
    ours = per_row(grpo_without_lost(with_lost, mask, groups)[0], mask)
    scores, clean_mask, clean_groups = batch([[1.0, -1.0, 1.0], [1.0, -1.0]])
    clean = per_row(compute_grpo_outcome_advantage(scores, clean_mask, clean_groups)[0], clean_mask)
    assert [value for value in ours if value] == clean
    assert [ours[1], ours[4]] == [0.0, 0.0]


def test_verls_own_counts_lost_rows():
    # The fault: fails when verl leaves fully masked rows out, and our estimator may go.
    scores, mask, groups = batch([[1.0, None, 1.0]])
    advantages, _ = compute_grpo_outcome_advantage(scores, mask, groups)
    assert float(advantages.abs().max()) > 0


@pytest.mark.parametrize(
    "rewards",
    [[[1.0, None]], [[None, None, -1.0], [None, 1.0]], [[None, None]], [[1.0]], [[1.0, 1.0, None]]],
)
def test_a_group_with_nothing_to_compare_has_no_advantage(rewards: list[list[float | None]]):
    scores, mask, groups = batch(rewards)
    advantages, returns = grpo_without_lost(scores, mask, groups)
    assert torch.equal(advantages, torch.zeros_like(scores))
    assert torch.equal(returns, advantages)
    assert not torch.isnan(advantages).any()


def test_the_deviation_is_left_out_when_the_config_says_so():
    scores, mask, groups = batch([[1.0, None, -1.0, -1.0]])
    plain = per_row(grpo_without_lost(scores, mask, groups, config=AlgoConfig(norm_adv_by_std_in_grpo=False))[0], mask)
    assert plain == pytest.approx([4 / 3, 0.0, -2 / 3, -2 / 3])
    scaled = per_row(grpo_without_lost(scores, mask, groups, config=AlgoConfig(norm_adv_by_std_in_grpo=True))[0], mask)
    assert scaled == pytest.approx([1.1547, 0.0, -0.57735, -0.57735], abs=1e-4)


def test_the_rewards_are_not_changed():
    scores, mask, groups = batch([[1.0, None, -1.0]])
    before = scores.clone()
    grpo_without_lost(scores, mask, groups)
    assert torch.equal(scores, before)


def test_verl_calls_it_as_it_calls_its_own():
    scores, mask, groups = batch([[1.0, None, -1.0], [1.0, 1.0]])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": mask}, non_tensors={"uid": groups}
    )
    done = compute_advantage(data, NAME, num_repeat=3, config=AlgoConfig(norm_adv_by_std_in_grpo=True))
    assert per_row(done.batch["advantages"], mask)[0] == pytest.approx(0.7071, abs=1e-4)
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
