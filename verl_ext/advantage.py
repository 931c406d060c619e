"""GRPO's advantage when some trajectories were lost to our own infrastructure.

A lost trajectory is marked by a response mask of zeros. It says nothing about the policy, so it must not
move its group's mean and deviation either; verl 0.6.1's GRPO would count its reward like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

NAME = "grpo_without_lost"


@register_adv_est(NAME)
def grpo_without_lost(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's GRPO over the trajectories that count; zero for the others.

    Args:
        token_level_rewards: float32 (B, T), the reward on the last token.
        response_mask: int (B, T), 1 = sampled by the model; a row of zeros is a lost trajectory.
        index: object (B,), one value per prompt: the group.
        config: verl's algorithm config; `norm_adv_by_std_in_grpo` is honoured.
        kwargs: what verl gives other estimators.

    Returns:
        Advantages and returns, the same float32 (B, T). A group with fewer than two trajectories that count
        has advantage 0: its only reward has nothing to be compared with.

    Source: GRPO, arXiv:2402.03300 section 4.1; verl 0.6.1 core_algos.compute_grpo_outcome_advantage.
    """
    counts_B = response_mask.bool().any(dim=-1).cpu().numpy()
    _, group_B = np.unique(np.asarray(index).astype(str), return_inverse=True)
    size_of_group = np.bincount(group_B[counts_B], minlength=int(group_B.max()) + 1)
    kept = torch.as_tensor(np.flatnonzero(counts_B & (size_of_group[group_B] >= 2)))
    advantages_BT = torch.zeros_like(token_level_rewards)
    if len(kept):
        normalise = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
        advantages_BT[kept], _ = compute_grpo_outcome_advantage(
            token_level_rewards=token_level_rewards[kept],
            response_mask=response_mask[kept],
            index=np.asarray(index)[kept.numpy()],
            norm_adv_by_std_in_grpo=normalise,
        )
    return advantages_BT, advantages_BT
