"""Processes of a run that are begun before they are needed, so that their imports cost no waiting."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_UNHURRIED = 10  # nice(2)


def start_on_nodes(process: type, node_ids: Sequence[str], name: str, *, soft: bool, num_gpus: int = 0) -> list[Any]:
    """Start one Ray actor of a plain class for each entry of `node_ids`, on that node; does not wait.

    Args:
        process: a class without arguments.
        node_ids: where.
        name: of the actors, with a number behind it.
        soft: whether another node will do.
        num_gpus: of each, for itself.
    """
    remote_class = ray.remote(process)
    return [
        remote_class.options(
            name=f"{name}_{index}",
            # With num_gpus named and num_cpus not, Ray would count one for each as long as it lives.
            num_cpus=0,
            num_gpus=num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=soft),
        ).remote()
        for index, node_id in enumerate(node_ids)
    ]


def import_unhurriedly(module: str) -> Any:
    """Import a module at a low priority, for a process that is begun early: others are waited for, this one is not.

    In a thread of its own, since Linux has a priority for each thread and an ordinary user cannot raise one again.
    """
    with ThreadPoolExecutor(1, initializer=_give_way) as thread:
        return thread.submit(importlib.import_module, module).result()


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _UNHURRIED)
