"""`python -m verl_ext.platforms PLATFORM`: prints the platform's file, or writes its files to a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_ext.errors import VerlAgsError
from verl_ext.platforms.facts import gather
from verl_ext.platforms.render import PLATFORMS, render


def main(arguments: Sequence[str]) -> int:
    """Render; exit status 2 if something asked for is wrong."""
    options = _parser().parse_intermixed_args(arguments)
    platform = PLATFORMS[options.platform]
    asked = {name: getattr(options, name) for name in ("name", "image", "project", "working_dir", "data_root",
                                                       "env_file", "secret", "claim")}  # fmt: skip
    asked = {**platform.defaults, **{name: value for name, value in asked.items() if value}}
    try:
        facts = gather(hardware=options.hardware, nodes=options.nodes, overrides=options.overrides, **asked)
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    files = render(options.platform, facts)
    if not options.out:
        for name, text in files.items():
            if len(files) > 1:
                sys.stderr.write(f"---- {name} (--out FOLDER writes the files)\n")
            sys.stdout.write(text)
            sys.stdout.flush()
        return 0
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            sys.stdout.write(f"{folder / name}\n")
    except OSError as error:
        sys.stderr.write(f"{folder} cannot be written ({error.strerror}): give --out another folder\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invoke render",
        description="Print what a platform wants: " + "; ".join(f"{name}, {it.doc}" for name, it in PLATFORMS.items()),
        allow_abbrev=False,
    )
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--hardware", default="h200x8", help="a file of recipe/retool/config/hardware: GPUs of a node")
    parser.add_argument("--nodes", type=int, default=2, help="with GPUs")
    parser.add_argument("--name", default="", help="of the job")
    parser.add_argument("--image", default="", help="with its registry")
    parser.add_argument("--project", default="", help="the project's folder on the nodes")
    parser.add_argument("--working-dir", default="", help="where TI-ONE's built-in image finds the project")
    parser.add_argument("--data-root", default="", help="on storage that all nodes share")
    parser.add_argument("--env-file", default="", help="the .env on the nodes")
    parser.add_argument("--secret", default="", help="name of the Kubernetes secret made of .env")
    parser.add_argument("--claim", default="", help="name of the Kubernetes volume claim for the data root")
    parser.add_argument("--out", default="", help="folder to write to, in place of standard output")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="verl's own keys")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
