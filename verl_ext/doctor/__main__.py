"""`python -m verl_ext.doctor [--deep] [--json]`: exit status 1 if a line is red."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verl_ext.doctor import examine, is_well, to_json, to_text


def main(arguments: Sequence[str]) -> int:
    """Look, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="invoke doctor", description="What a run would meet on this machine.")
    parser.add_argument("--deep", action="store_true", help="import torch, flash-attn, vllm and verl too")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    findings = list(examine(deep=options.deep))
    text = to_json(findings) + "\n" if options.json else to_text(findings, colour=sys.stdout.isatty())
    sys.stdout.write(text)
    return 0 if is_well(findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
