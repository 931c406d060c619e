"""A checkpoint as a Hugging Face folder: `invoke export RUN`.

verl's model merger does the work, for any number of ranks. Around it: every shard is looked through before it is read,
an adapter (LoRA) is merged into the weights, the folder says what it is (README.md), and it appears whole or not at
all. `--verify` holds it against what was trained (verl_ext/checkpoint/proof.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_ext.checkpoint import kept
from verl_ext.checkpoint.kept import ADAPTER, Checkpoint, find_checkpoint
from verl_ext.checkpoint.model_card import model_card
from verl_ext.errors import ConfigurationError, VerlAgsError
from verl_ext.settings import Settings


def export(checkpoint: Checkpoint, target: Path, say: Callable[[str], None]) -> Path:
    """Merge a checkpoint into `target`, which appears whole or not at all.

    Raises:
        ConfigurationError: a shard is missing or damaged, `target` is there, or it cannot be merged.
    """
    if target.exists():
        raise ConfigurationError(f"{target} is there already: delete it or choose another --out")
    say(f"looking through the {checkpoint.world_size} shard(s) of step {checkpoint.step}")
    wrong = list(kept.problems(checkpoint))
    if wrong:
        raise ConfigurationError.listing(f"{checkpoint.folder} cannot be exported", wrong)
    scratch = target.with_name(f".{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        say("merging them")
        flags = ["--backend", "fsdp", "--local_dir", str(checkpoint.actor), "--target_dir", str(scratch)]
        _run(checkpoint, "-m", "verl.model_merger", "merge", *flags)
        if (scratch / ADAPTER).is_dir():
            say("merging the adapter into the weights")
            _run(checkpoint, "-m", "verl_ext.checkpoint.lora", str(scratch), str(checkpoint.lora_alpha))
        (scratch / "README.md").write_text(model_card(checkpoint, scratch), encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written ({error}): choose another --out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def exported(checkpoint: Checkpoint, target: Path, say: Callable[[str], None]) -> Path:
    """`target`, exported now unless it is there.

    Raises:
        ConfigurationError: as `export`, or what is there is older than the checkpoint, which a run that went on made
            anew.
    """
    if not target.exists():
        return export(checkpoint, target, say)
    if any(shard.is_file() and shard.stat().st_mtime > target.stat().st_mtime for shard in checkpoint.shards()):
        raise ConfigurationError(f"{target} is older than the checkpoint that it should hold: delete it")
    return target


def _run(checkpoint: Checkpoint, *words: str) -> None:
    """A process of its own, since it imports torch and holds the weights."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ConfigurationError(f"{checkpoint.actor} cannot be merged: {said[-1] if said else 'no message'}")


def main(arguments: Sequence[str]) -> int:
    """Parse, export, verify; prints the folder, or JSON. Status 1: the folder does not hold what was trained."""
    parser = argparse.ArgumentParser(prog="invoke export", description="Merge a checkpoint to Hugging Face format.")
    parser.add_argument("run", help="a run's name or folder, or a checkpoint's folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest that is kept")
    parser.add_argument("--out", type=Path, help="default: RUN/export/global_step_STEP")
    parser.add_argument("--verify", action="store_true", help="load it in transformers and vLLM, compare logits")
    parser.add_argument("--json", action="store_true", help="print what was found as one line of JSON")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        if not options.json:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    try:
        checkpoint = find_checkpoint(Settings.load().folder("runs"), options.run, options.step)
        folder = export(checkpoint, options.out or checkpoint.export_folder, say)
        say(f"exported step {checkpoint.step} to {folder}")
        found: dict[str, Any] = {"folder": str(folder), "step": checkpoint.step}
        if options.verify:
            from verl_ext.checkpoint.proof import verify

            say("loading it in transformers and vLLM, beside the weights as they were trained")
            found |= verify(checkpoint, folder)
            for name, value in found["differences"].items():
                say(f"{name}: {value:.3g}")
            say("it is what was trained" if found["ok"] else "it is NOT what was trained")
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
