"""Lets verl 0.6.1 and vLLM 0.11.0 train on a machine without a GPU.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES=verl_ext.cpu, set by the launcher for
`hardware: cpu`). Each function below is one gap of one library, with what goes wrong without it. vLLM's are
applied when vLLM is imported, since most processes of a run never do.
"""

from __future__ import annotations

from typing import Any

import torch
import wrapt


def complete_torch_cpu_namespace() -> None:
    """Give `torch.cpu` what verl calls on the device's namespace (`get_torch_device()`), as no-ops."""
    cpu: Any = torch.cpu

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def zero(*_: Any, **__: Any) -> int:
        return 0

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cpu, name, zero)
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "ipc_collect"):
        setattr(cpu, name, nothing)
    cpu.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    cpu.get_device_name = lambda *_: "cpu"
    cpu.manual_seed = torch.manual_seed
    cpu.get_rng_state = lambda *_: torch.get_rng_state()
    cpu.set_rng_state = lambda state, *_: torch.set_rng_state(state)


def name_the_cpu_in_verl() -> None:
    """verl 0.6.1 answers "nccl" for the backend, and the text "cpu" where an index or a device is meant."""
    import verl.utils.device as device

    device.get_nccl_backend = lambda: "gloo"
    device.get_device_id = lambda: torch.device("cpu")  # type: ignore[assignment]


def accept_one_gloo_backend() -> None:
    """verl asks for "cpu:gloo,cpu:gloo" (one for each of two devices), which torch refuses as a duplicate."""
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and backend.startswith("cpu:gloo,cpu"):
            backend = "gloo"
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def keep_vllm_off_ipex(module: Any) -> None:
    """Switch chunked prefill and prefix caching off in vLLM's CPU platform.

    vLLM V1 turns chunked prefill on, and on x86 that path needs IPEX, whose decode kernel fails ("Sliding
    window unsupported"). verl drops options whose value is False, so no setting can do it.
    """
    original = module.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        scheduler = vllm_config.scheduler_config
        scheduler.enable_chunked_prefill = scheduler.chunked_prefill_enabled = False
        if vllm_config.cache_config:
            vllm_config.cache_config.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len)

    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def find_the_cores_on_every_node(module: Any) -> None:
    """vLLM 0.11.0 indexes the core list by verl's global rank after slicing it by data-parallel rank.

    On a second node that is an IndexError in init_device, whatever VLLM_CPU_OMP_THREADS_BIND says.
    """
    original = module.CPUWorker.init_device

    def init_device(self: Any) -> None:
        parallel = self.parallel_config
        kept, parallel.data_parallel_rank_local = parallel.data_parallel_rank_local, None
        try:
            original(self)
        finally:
            parallel.data_parallel_rank_local = kept

    module.CPUWorker.init_device = init_device


complete_torch_cpu_namespace()
name_the_cpu_in_verl()
accept_one_gloo_backend()
wrapt.register_post_import_hook(keep_vllm_off_ipex, "vllm.platforms.cpu")
wrapt.register_post_import_hook(find_the_cores_on_every_node, "vllm.v1.worker.cpu_worker")
