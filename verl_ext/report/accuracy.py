"""Accuracy of each step with its interval, from the trajectories: the logged mean alone does not say how sure it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.report.run_folder import StepFile

_Z95 = 1.959964  # of the normal distribution, two-sided


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over one step's trajectories of one data source.

    Attributes:
        step: of the training.
        validation: whether it is a validation's.
        source: name of the data set; "" for all of a training batch.
        mean: over trajectories that were not lost.
        interval: low and high end of 95 %; None with fewer than two prompts.
        trajectories: how many were counted.
        prompts: how many different ones they answer.
    """

    step: int
    validation: bool
    source: str
    mean: float
    interval: tuple[float, float] | None
    trajectories: int
    prompts: int


def read_accuracies(files: Iterable[StepFile]) -> list[Accuracy]:
    """One for each training step, one for each validation and data source; files that cannot be read have none."""
    found = []
    for file in files:
        try:
            table = pq.read_table(file.path, columns=["accuracy", "group", "data_source", "infra_failed"])
        except (OSError, pa.ArrowException):
            continue
        values = table["accuracy"].to_numpy()
        counted = ~table["infra_failed"].to_numpy() & np.isfinite(values)
        groups = np.asarray(table["group"].to_pylist(), dtype=object)
        sources = np.asarray(table["data_source"].to_pylist(), dtype=object)
        for source in sorted(set(sources.tolist())) if file.validation else [""]:
            chosen = counted & (sources == source) if file.validation else counted
            if chosen.any():
                mean, interval, prompts = clustered_mean(values[chosen], groups[chosen].tolist())
                number = int(chosen.sum())
                found.append(Accuracy(file.step, file.validation, source, mean, interval, number, prompts))
    return found


def clustered_mean(values: np.ndarray, groups: Sequence[str]) -> tuple[float, tuple[float, float] | None, int]:
    """The mean, its 95 % interval, and the number of clusters.

    Several answers to one prompt are no independent draws, so the prompts are: the variance is that of the prompts'
    summed residuals (cluster-robust), with G/(G-1) for a small number of them. The interval is the normal one, cut at
    0 and 1 if every value lies between them.

    Args:
        values: float (N,).
        groups: the cluster of each value.

    Source: A. C. Cameron, D. L. Miller, A Practitioner's Guide to Cluster-Robust Inference, J. Human Resources 2015,
    section II.
    """
    mean = float(values.mean())
    _, cluster = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    residuals = np.bincount(cluster, weights=values - mean)
    count = len(residuals)
    if count < 2:
        return mean, None, count
    variance = count / (count - 1) * float((residuals**2).sum()) / len(values) ** 2
    half = _Z95 * variance**0.5
    if values.min() < 0.0 or values.max() > 1.0:
        return mean, (mean - half, mean + half), count
    return mean, (max(0.0, mean - half), min(1.0, mean + half)), count
