"""The page: template, style and scripts, plotly's own script, and the data, written as one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from verl_ext.report import curves, tables
from verl_ext.report.accuracy import read_accuracies
from verl_ext.report.compare import difference_tables
from verl_ext.report.run_folder import Run, StepFile
from verl_ext.report.tables import Table
from verl_ext.report.trajectories import Index, pack, write_packs

_WEB = files("verl_ext.report") / "web"
_SCRIPTS = ("elements.js", "records.js", "python_code.js", "conversation.js", "viewer.js", "curves.js", "page.js")
_STYLE_OF_SCRIPT = re.compile(r"\.textContent=`([^`]*)`")
_END = b"</body>\n</html>\n"


@dataclass(frozen=True)
class Section:
    """A tab of tables; `filter` puts a box over them that hides the rows without its words."""

    name: str
    tables: Sequence[Table]
    filter: bool = True


def write_report(
    run: Run, out: Path, *, step_files: Sequence[StepFile], max_bytes: float, done: Callable[[int], None]
) -> Index:
    """Write the report of one run; the file appears whole or not at all.

    Args:
        run: from `run_folder.read_run`.
        out: the file.
        step_files: those whose trajectories are shown.
        max_bytes: of the trajectories' texts as they stand in the page, roughly.
        done: told of trajectories that are done.
    """
    accuracies = read_accuracies(run.step_files)
    overview = [tables.alarm_table([run]), tables.evaluation_table(run)]
    head = _head(
        run.name,
        [run],
        panels=curves.draw([run], [accuracies]),
        notes=run.notes,
        tiles=tables.tiles(run, accuracies),
        overview=[table for table in overview if table.rows],
        trajectories=sum(file.rows for file in step_files),
        sections=[Section("Configuration", tables.run_tables(run))],
    )
    scratch = out.with_name(f".{out.name}.part")
    noted = len(run.notes)
    try:
        with scratch.open("wb") as file:
            file.write(head)
            index = write_packs(step_files, file, max_bytes=max_bytes, done=done, notes=run.notes)
            packed = pack(index.to_json(run.notes[noted:]))
            file.write(b'<script type="application/gzip" id="index">%s</script>\n' % packed)
            file.write(_END)
        scratch.replace(out)
    finally:
        scratch.unlink(missing_ok=True)
    return index


def write_comparison(runs: Sequence[Run], out: Path) -> None:
    """Write the curves of several runs over each other, and what differs between them."""
    accuracies = [read_accuracies(run.step_files) for run in runs]
    overview = [tables.newest_numbers(runs, accuracies), tables.alarm_table(runs)]
    head = _head(
        " against ".join(run.name for run in runs),
        runs,
        panels=curves.draw(runs, accuracies),
        notes=[f"{run.name}: {note}" for run in runs for note in run.notes],
        overview=[table for table in overview if table.rows],
        sections=[Section("Differences", difference_tables(runs))],
    )
    scratch = out.with_name(f".{out.name}.part")
    try:
        scratch.write_bytes(head + _END)
        scratch.replace(out)
    finally:
        scratch.unlink(missing_ok=True)


def _head(
    title: str,
    runs: Sequence[Run],
    *,
    panels: Sequence[dict],
    notes: Sequence[str],
    overview: Sequence[Table],
    sections: Sequence[Section],
    tiles: Sequence[tables.Tile] = (),
    trajectories: int = 0,
) -> bytes:
    """Everything of the page before the trajectories."""
    style = (_WEB / "page.css").read_text(encoding="utf-8")
    scripts = [get_plotlyjs(), *((_WEB / name).read_text(encoding="utf-8") for name in _SCRIPTS)]
    metrics = [{"run": run.name, "steps": sorted(run.metrics), "values": _by_name(run)} for run in runs]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((_WEB / "page.html.jinja").read_text(encoding="utf-8"))
    html = template.render(
        title=title,
        policy=content_security_policy(scripts, [style]),
        style=style,
        scripts=scripts,
        data=[(name, pack(json.dumps(value)).decode()) for name, value in (("panels", panels), ("metrics", metrics))],
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        notes=notes,
        tiles=tiles,
        overview=overview,
        trajectories=trajectories,
        sections=sections,
    )
    return html.encode("utf-8")


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Nothing is loaded, sent or run but these scripts and styles, by their hashes.

    plotly makes style elements: an empty one that it fills through the object model, and one for maps with a text of
    its own. It sets style attributes, which can load nothing here, and saves pictures through data and blob URLs.

    Source: W3C Content Security Policy Level 3.
    """
    made_by_scripts = ["", *(text for script in scripts for text in _STYLE_OF_SCRIPT.findall(script))]
    return "; ".join((
        "default-src 'none'",
        f"script-src {_hashes(scripts)}",
        f"style-src {_hashes([*styles, *made_by_scripts])}",
        "style-src-attr 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    ))  # fmt: skip


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _by_name(run: Run) -> dict[str, list[float | None]]:
    names = sorted({name for numbers in run.metrics.values() for name in numbers})
    return {name: [run.metrics[step].get(name) for step in sorted(run.metrics)] for name in names}
