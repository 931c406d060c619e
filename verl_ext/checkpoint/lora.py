"""Merges the adapter of an exported checkpoint into its weights: `python -m verl_ext.checkpoint.lora FOLDER ALPHA`.

verl 0.6.1's merger writes the base weights and beside them the adapter, with `lora_alpha` 0, which scales it to
nothing. The run's configuration has the right one; both files are put right here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.kept import ADAPTER


def merge(folder: Path, alpha: float) -> None:
    """Give the adapter its scale, and add it to the weights of the folder.

    Args:
        folder: as the merger left it.
        alpha: `actor_rollout_ref.model.lora_alpha` of the run.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = folder / ADAPTER / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"lora_alpha": alpha}, indent=2) + "\n", encoding="utf-8")
    # In float32, so that a small change is not rounded away before it is added.
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, str(folder / ADAPTER)).merge_and_unload()  # pyright: ignore[reportCallIssue]
    merged.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    merge(Path(sys.argv[1]), float(sys.argv[2]))
