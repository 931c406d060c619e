"""What the image costs: `python tests/bench/bench_image.py [--targets ci cpu] [--smoke]`.

As root, with buildah and podman. Built over the stand-in for NVIDIA's base that tests/image makes. Cold is without any
layer and any downloaded package; "source changed" is what a developer waits for. With --smoke the cpu target trains in
a container without a network.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image"))
from conftest import Engine, copy_with_secrets, import_base, own_storage


def built(engine: Engine, context: Path, target: str) -> float:
    """Seconds of one build."""
    started_s = time.monotonic()
    engine.build(context, target)
    return time.monotonic() - started_s


def layers(engine: Engine, target: str) -> list[tuple[str, float]]:
    """What made each layer that has a size, newest first, and its MB."""
    history = json.loads(engine.call("podman", "history", "--no-trunc", "--format", "json", engine.name(target)).stdout)
    return [(_short(layer["CreatedBy"]), layer["size"] / 1e6) for layer in history if layer["size"] > 50_000]


def _short(created_by: str) -> str:
    command = re.sub(r"^(\|\d+ .*?)?/bin/(sh|bash) (-\S+ )*", "", created_by)
    command = re.sub(r"--mount=\S+ |dir:\S+ in |file:\S+ in ", "", command)
    return " ".join(command.split())[:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["ci"], choices=["ci", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="train in the cpu target")
    options = parser.parse_args()
    if options.smoke and "cpu" not in options.targets:
        parser.error("--smoke trains in the cpu target, and that is not built: add it with --targets cpu")
    console = Console(width=140)
    with own_storage() as engine:
        import_base(engine)
        context = copy_with_secrets(engine.folder / "context")
        seconds = Table("target", "cold, s", "nothing changed, s", "source changed, s", "MB", title="builds")
        for target in options.targets:
            cold, same = built(engine, context, target), built(engine, context, target)
            with (context / "verl_ext" / "errors.py").open("a") as source:
                source.write("# changed\n")
            changed = built(engine, context, target)
            sizes = layers(engine, target)
            seconds.add_row(
                target, *(f"{one:.1f}" for one in (cold, same, changed)), f"{sum(mb for _, mb in sizes):,.0f}"
            )
            table = Table("layer", "MB", title=target)
            for name, mb in sizes:
                table.add_row(name, f"{mb:,.1f}")
            console.print(table)
        console.print(seconds)
        if options.smoke:
            started_s = time.monotonic()
            room = ("--shm-size=2g", "--tmpfs=/tmp:rw,size=8g,mode=1777", "--volume=smoke:/data")
            done = engine.run("invoke", "smoke", flags=room, image="cpu", status=None)
            console.print("\n".join(done.stdout.splitlines()[-40:] + done.stderr.splitlines()[-5:]), markup=False)
            console.print(f"smoke in a container without a network: status {done.returncode}, "
                          f"{time.monotonic() - started_s:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
