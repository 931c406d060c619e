"""The source of an installed library, without importing it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def source(module: str) -> str:
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)), *rest.split(".")).with_suffix(".py").read_text("utf-8")


def functions(module: str, name: str) -> dict[str, ast.AST]:
    tree = ast.parse(source(module))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
