"""What is in this image or environment, read from inside: packages with licences, system, CUDA, revision, locks.

As a table (`invoke manifest`), as JSON, or as a software bill of materials in CycloneDX 1.5. Nothing in it depends
on when it was made, so two builds can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_ext.installed import normal, stack_of
from verl_ext.stack import LOCKS

# Written when the image is built.
MANIFEST, SBOM = Path("/opt/verl-ags-manifest.json"), Path("/opt/verl-ags-sbom.cdx.json")
ROOT = Path(__file__).resolve().parents[2]
_LONGEST_LICENCE = 60  # some packages put the whole text there


def manifest(revision: str = "") -> dict[str, Any]:
    """Everything that says what this image is.

    Args:
        revision: of the project; from the built image or from git if "".
    """
    packages = python_packages()
    return {
        "project": "verl-ags",
        "revision": revision or _revision(),
        "stack": stack_of({name: entry["version"] for name, entry in packages.items()}) or "none",
        "python": platform.python_version(),
        "system": _system(),
        "cuda": {name: entry["version"] for name, entry in packages.items() if name.startswith("nvidia-")},
        "locks": {path.name: _sha256(path) for path in sorted(LOCKS.glob("*.txt"))},
        "packages": packages,
        "system_packages": system_packages(),
    }


def python_packages() -> dict[str, dict[str, str]]:
    """Version and licence of each package, by its normal name."""
    found: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = normal(distribution.name)
        found.setdefault(name, {"version": distribution.version, "licence": licence(distribution.metadata)})
    return dict(sorted(found.items()))


def licence(fields: metadata.PackageMetadata) -> str:
    """What a package's metadata says: the SPDX expression, else its own words if short, else its classifiers."""
    if expression := fields.get("License-Expression"):
        return expression
    said = (fields.get("License") or "").strip()
    if said and len(said) <= _LONGEST_LICENCE and "\n" not in said and said.upper() != "UNKNOWN":
        return said
    marks = [mark.rpartition(" :: ")[2] for mark in fields.get_all("Classifier") or () if mark.startswith("License ::")]
    return ", ".join(marks) or (said.splitlines()[0][:_LONGEST_LICENCE] if said else "not said")


def system_packages() -> dict[str, str]:
    """Version of each package of a Debian or Ubuntu, {} elsewhere."""
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\n"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(sorted(line.split("\t", 1) for line in listing.splitlines() if "\t" in line))


def sbom(facts: dict[str, Any]) -> dict[str, Any]:
    """The manifest as a CycloneDX 1.5 document (bom-1.5.schema.json of CycloneDX/specification)."""
    distribution = "ubuntu" if "ubuntu" in facts["system"].lower() else "debian"
    python = [
        {
            **_component(name, entry["version"], f"pkg:pypi/{quote(name)}"),
            "licenses": [{"license": {"name": entry["licence"]}}],
        }
        for name, entry in facts["packages"].items()
    ]
    system = [
        _component(name, version, f"pkg:deb/{distribution}/{quote(name)}")
        for name, version in facts["system_packages"].items()
    ]
    project = _component(facts["project"], facts["revision"], f"pkg:generic/{facts['project']}")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**project, "type": "container"}},
        "components": python + system,
    }


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    identity = f"{purl}@{quote(version)}"
    return {"type": "library", "bom-ref": identity, "name": name, "version": version, "purl": identity}


def to_text(facts: dict[str, Any], width: int = 118) -> str:
    """A table for people, and how many packages have which licence."""
    table = Table(box=None, pad_edge=False)
    for title in ("package", "version", "licence"):
        table.add_column(title)
    for name, entry in facts["packages"].items():
        table.add_row(name, entry["version"], escape(entry["licence"]))
    counts = Counter(entry["licence"] for entry in facts["packages"].values())
    with io.StringIO() as page:
        console = Console(file=page, width=width, highlight=False)
        console.print(table)
        console.print(f"\n{facts['project']} {facts['revision']}, stack {facts['stack']}, Python {facts['python']}, "
                      f"{facts['system']}, {len(facts['system_packages'])} system packages")  # fmt: skip
        console.print(escape("Licences: " + "; ".join(f"{name} {count}" for name, count in counts.most_common())))
        return page.getvalue()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _revision() -> str:
    if MANIFEST.is_file():
        return json.loads(MANIFEST.read_text(encoding="utf-8"))["revision"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Print what is in this image or environment."""
    parser = argparse.ArgumentParser(prog="invoke manifest", description="What is in this image or environment.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--sbom", action="store_true", help="as CycloneDX 1.5")
    options = parser.parse_args(arguments)
    facts = manifest()
    if options.json or options.sbom:
        sys.stdout.write(json.dumps(sbom(facts) if options.sbom else facts, indent=2) + "\n")
    else:
        sys.stdout.write(to_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
