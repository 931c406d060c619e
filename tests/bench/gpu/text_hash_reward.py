"""A reward that differs within a group though a random model is never right: then the policy loss is not zero."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """-1 or 1 by a hash of the text."""
    return 1.0 if zlib.crc32(solution_str.encode("utf-8", "replace")) % 2 else -1.0
