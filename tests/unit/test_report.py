"""verl_ext.report without a browser: what is read, what is said of what cannot be, and what the file holds."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_folders import step_metrics, trajectory, write_run

from verl_ext import runs
from verl_ext.alarms.rules import RULES
from verl_ext.report.__main__ import main
from verl_ext.report.accuracy import clustered_mean, read_accuracies
from verl_ext.report.curves import PANELS, draw
from verl_ext.report.run_folder import between, read_run
from verl_ext.report.tables import data_table, duration, evaluation_table

WEB = Path(__file__).parents[2] / "verl_ext" / "report" / "web"


class Page(HTMLParser):
    """A report as a parser of HTML sees it: its elements, and what the inert ones hold."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.packed: dict[str, str] = {}
        self.policy = ""
        self._open = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        self._open = values.get("id") or "" if tag == "script" and values.get("type") == "application/gzip" else ""
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.packed[self._open] = self.packed.get(self._open, "") + data

    def unpack(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.packed[name])))

    def records(self) -> list[Any]:
        names = sorted((name for name in self.packed if name.startswith("pack-")), key=lambda name: int(name[5:]))
        return [record for name in names for record in self.unpack(name)["records"]]


def written(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Page:
    assert main([str(argument) for argument in arguments]) == 0
    return Page(Path(capsys.readouterr().out.strip()))


# --- what is read


def test_a_run_is_found_by_its_folder_and_by_its_name(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "runs" / "r1")
    for given in ([folder], ["r1", "--data-root", tmp_path]):
        written(capsys, *given)
        (folder / "report.html").unlink()


def test_a_run_that_is_not_there_is_told_with_one_that_is(tmp_path: Path, capsys):
    write_run(tmp_path / "runs" / "r1")
    assert main(["r2", "--data-root", str(tmp_path)]) == 2
    assert "no run 'r2', neither a folder nor a name in " in capsys.readouterr().err


def test_an_evaluation_is_no_run_but_holds_some(tmp_path: Path, capsys):
    write_run(tmp_path / "e1" / "trained")
    assert main([str(tmp_path / "e1")]) == 2
    assert f"it holds runs: give {tmp_path}/e1/trained" in capsys.readouterr().err


def test_a_run_without_a_step_is_told_how_far_it_came(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "r", steps=0)
    assert main([str(folder)]) == 2
    said = capsys.readouterr().err
    assert "has no step yet, it has come to 'start': write the report again when the first step is logged" in said
    assert "logs says why" in said
    assert not (folder / "report.html").exists()


def test_a_line_that_still_grows_is_left_for_the_next_report(tmp_path: Path):
    folder = write_run(tmp_path / "r", steps=2)
    with (folder / runs.METRICS).open("a") as file:
        file.write('{"step": 3, "time_s": 1, "da')
    run = read_run(folder)
    assert sorted(run.metrics) == [0, 1, 2]
    assert run.notes == []


def test_damaged_files_are_left_out_and_said(tmp_path: Path):
    folder = write_run(tmp_path / "r", steps=3)
    half = folder / "rollouts" / "train-000002.parquet"
    half.write_bytes(half.read_bytes()[:500])
    pq.write_table(pa.table({"reward": [1.0]}), folder / "rollouts" / "train-000009.parquet")
    (folder / runs.MANIFEST).write_text("{")
    with (folder / runs.METRICS).open("a") as file:
        file.write("no JSON\n")
    run = read_run(folder)
    assert [(file.step, file.validation) for file in run.step_files] == [(0, True), (1, False), (3, False)]
    said = "\n".join(run.notes)
    assert "train-000002.parquet is cut off or damaged and is left out. While the run goes on, write the report" in said
    assert "train-000009.parquet is no file of trajectories, and is left out: it has no problem_id, " in said
    assert "manifest.json cannot be read" in said
    assert "metrics.jsonl: 1 damaged line(s) are left out" in said


def test_a_step_that_a_resumed_run_logged_again_has_its_later_numbers(tmp_path: Path):
    folder = write_run(tmp_path / "r", steps=2)
    with (folder / runs.METRICS).open("a") as file:
        file.write(json.dumps({"step": 2, "time_s": 9, "data": {"actor/entropy": 7.5, "x": None, "y": "t"}}) + "\n")
    run = read_run(folder)
    assert run.series("actor/entropy") == ([1, 2], [step_metrics(1)["actor/entropy"], 7.5])
    assert run.series("x") == run.series("y") == ([], [])


def test_steps_are_chosen_with_both_ends(tmp_path: Path):
    files = read_run(write_run(tmp_path / "r", steps=4)).step_files
    assert [file.step for file in between(files, (2, 3))] == [2, 3]
    assert between(files, None) == files


# --- numbers


def test_the_interval_takes_prompts_and_not_samples_as_independent():
    alike = np.array([1.0] * 8 + [0.0] * 8 + [1.0] * 8 + [0.0] * 8)
    prompts = [f"p{at // 8}" for at in range(32)]
    mean, interval, count = clustered_mean(alike, prompts)
    assert (mean, count) == (0.5, 4)
    # Each prompt is one draw of 0 or 1: the deviation of a mean of 4 such, (1/2) * sqrt(4/3) / sqrt(4).
    assert interval == (0.0, 1.0) or interval == pytest.approx((0.5 - 1.959964 / 12**0.5, 0.5 + 1.959964 / 12**0.5))
    free = clustered_mean(alike, [str(at) for at in range(32)])[1]
    assert free
    assert free[1] - free[0] == pytest.approx(2 * 1.959964 * 0.5 / 31**0.5)


def test_an_interval_of_shares_stays_a_share_and_one_prompt_has_none():
    assert clustered_mean(np.array([1.0, 1.0, 0.0]), ["a", "b", "c"])[1] == (pytest.approx(0.0133, abs=1e-3), 1.0)
    low, high = clustered_mean(np.array([-1.0, 1.0]), ["a", "b"])[1] or (0, 0)
    assert (low, high) == pytest.approx((-1.959964, 1.959964))
    assert clustered_mean(np.array([1.0, 0.0]), ["a", "a"])[1] is None


def test_lost_trajectories_are_in_no_accuracy(tmp_path: Path):
    rows = [trajectory("a"), trajectory("b", accuracy=0.0), trajectory("c", accuracy=0.0, infra_failed=True)]
    found = read_accuracies(read_run(write_run(tmp_path / "r", steps=1, rows=rows)).step_files)
    assert [(one.step, one.validation, one.source, one.mean, one.trajectories) for one in found] == [
        (0, True, "math_dapo", 0.5, 2),
        (1, False, "", 0.5, 2),
    ]


def test_each_panel_is_drawn_from_what_was_logged(tmp_path: Path):
    run = read_run(write_run(tmp_path / "r", steps=3))
    panels = {panel["title"]: panel["figure"] for panel in draw([run], [read_accuracies(run.step_files)])}
    assert set(panels) == {panel.title for panel in PANELS} - {"Clipped"}
    assert [trace["name"] for trace in panels["Accuracy"]["data"][1:]] == ["training", "math_dapo mean@1"]
    phases = {trace["name"]: trace["y"] for trace in panels["Time of a step"]["data"]}
    assert phases == {"rollout": [6.0] * 3, "old log-prob": [0.5] * 3, "update actor": [2.5] * 3, "other": [1.0] * 3}
    assert panels["Time of a step"]["layout"]["barmode"] == "stack"


def test_steps_with_an_alarm_are_tinted_in_the_panel_of_its_number(tmp_path: Path):
    folder = write_run(tmp_path / "r", steps=9)
    events = [("entropy-collapse", 2, "started"), ("entropy-collapse", 4, "ended"), ("truncation", 7, "started"),
              ("entropy-collapse", 8, "started"), ("grad-norm", "odd", "started")]  # fmt: skip
    lines = [json.dumps({"alarm": alarm, "step": step, "state": state}) for alarm, step, state in events]
    (folder / runs.ALARMS).write_text("\n".join(lines) + "\n")
    run = read_run(folder)

    def marks(*drawn) -> dict[str, list[tuple[float, float]]]:
        panels = {
            panel["title"]: panel["figure"]["layout"].get("shapes", []) for panel in draw(drawn, [[]] * len(drawn))
        }
        return {title: [(shape["x0"], shape["x1"]) for shape in shapes] for title, shapes in panels.items() if shapes}

    assert marks(run) == {"Entropy": [(1.5, 4.5), (7.5, 9.5)], "Errors": [(6.5, 9.5)]}
    assert marks(run, run) == {}


def test_each_alarm_has_one_panel():
    assert sorted(name for panel in PANELS for name in panel.alarms) == sorted(rule.name for rule in RULES)


def test_several_runs_have_a_colour_each(tmp_path: Path):
    both = [read_run(write_run(tmp_path / name, steps=2)) for name in ("a", "b")]
    figure = next(panel["figure"] for panel in draw(both, [[], []]) if panel["title"] == "Entropy")
    assert [trace["legendgroup"] for trace in figure["data"]] == ["a", "b"]
    assert len({trace["line"]["color"] for trace in figure["data"]}) == 2


def test_the_data_table_shows_prepare_datas_counts(tmp_path: Path):
    folder = write_run(tmp_path / "r")
    assert data_table(read_run(folder)).rows == [("/d/train.parquet", "ab" * 32)]
    side = {"rows_raw": 10, "rows_kept": 8, "rows_left_out": {"duplicate": 2}, "prompt_chars": {"median": 5}}
    (folder / runs.DATA_REPORT).write_text(json.dumps({"train": side, "val": {"rows_raw": 3}}))
    rows = {name: cells for name, *cells in data_table(read_run(folder)).rows}
    assert rows["rows read"] == ["10", "3"]
    assert rows["left out: duplicate"] == ["2", "0"]
    assert rows["prompt characters, median"] == ["5", "not counted"]


def test_evaluations_of_the_run_are_found_beside_it(tmp_path: Path):
    folder = write_run(tmp_path / "r")
    for name, run_id in (("e1", "r"), ("e2", "other")):
        (tmp_path / name).mkdir()
        result = {"setting": "tools", "data_source": "aime_2024", "mean": 0.5, "low": 0.4, "high": 0.6,
                  "pass_at_k": {"1": 0.5, "16": 0.75}, "majority_at_k": {"16": 0.6}}  # fmt: skip
        summary = {"kind": "evaluation", "id": name, "subject": {"run_id": run_id, "step": 30}, "results": [result]}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    rows = evaluation_table(read_run(folder)).rows
    assert [row[:7] for row in rows] == [
        ("e1", "30", "tools", "aime_2024", "50.0% (40.0% to 60.0%)", "75.0% of 16", "60.0% of 16")
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.44, "8.4 s"), (59.99, "1 min 0 s"), (725, "12 min 5 s"), (3599.7, "1 h 0 min"), (12_000, "3 h 20 min")],
)
def test_durations_read_as_people_say_them(seconds: float, text: str):
    assert duration(seconds) == text


# --- the file


def test_every_trajectory_is_in_the_page_whole(tmp_path: Path, capsys):
    calls = [("print(6 * 7)", "ok", "42"), ("1/0", "error", "ZeroDivisionError")]
    rows = [
        trajectory("a", turns=[("I compute.", calls), ("So \\boxed{42}.", ())]),
        trajectory("b", infra_failed=True, infra_error="gone", reward=float("nan"), turns=[]),
    ]
    page = written(capsys, write_run(tmp_path / "r", steps=2, rows=rows))
    index, records = page.unpack("index"), page.records()
    assert index["files"] == [["val-000000", 0, 1, 0], ["train-000001", 1, 0, 2], ["train-000002", 2, 0, 4]]
    assert [record["id"] for record in records] == ["train-1-a", "train-1-b"] * 3
    assert records[0]["mask"] == [1, 2, 5, 3]
    assert records[0]["turns"] == rows[0]["turns"]
    assert records[1]["infra_error"] == "gone"
    columns = index["columns"]
    assert columns["faults"] == [1, 16] * 3
    assert columns["tokens"] == [10, 0] * 3
    assert columns["trained"] == [5, 0] * 3
    assert columns["calls"] == [2, 0] * 3
    assert columns["reward"] == [1.0, None] * 3
    assert columns["group"] == [0, 1, 2, 3, 4, 5]
    assert [index["words"]["problem"][at] for at in columns["problem"]] == ["a", "b"] * 3


def test_packs_follow_each_other_without_a_gap(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("verl_ext.report.trajectories.PACK_BYTES", 2000)
    rows = [trajectory(f"p{at}", trajectory_id=f"t{at}") for at in range(40)]
    page = written(capsys, write_run(tmp_path / "r", steps=1, rows=rows))
    packs = page.unpack("index")["packs"]
    assert len(packs) > 6
    assert [record["id"] for record in page.records()] == [f"t{at}" for at in range(40)] * 2
    sizes = [len(page.unpack(f"pack-{number}")["records"]) for number in range(len(packs))]
    assert [sum(sizes[:number]) for number in range(len(packs))] == packs


def test_above_the_limit_whole_prompts_lose_their_texts_and_all_stay_listed(tmp_path: Path, capsys):
    noise = np.random.default_rng(1)
    rows = [trajectory(f"p{at // 2}", turns=[(noise.bytes(8000).hex(), ())]) for at in range(120)]
    folder = write_run(tmp_path / "r", steps=1, rows=rows)
    page = written(capsys, folder, "--max-mb", "1")
    index, records = page.unpack("index"), page.records()
    assert len(index["columns"]["reward"]) == len(records) == 240
    assert 40 < index["left_out"] < 200
    assert index["left_out"] == records.count(None)
    assert [record is None for record in records[::2]] == [record is None for record in records[1::2]]
    assert (folder / "report.html").stat().st_size < 8e6


def test_steps_that_are_not_there_are_told(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "r", steps=2)
    assert main([str(folder), "--steps", "7-9"]) == 2
    assert "it has those of steps 0 to 2" in capsys.readouterr().err
    page = written(capsys, folder, "--steps", "2")
    assert [file[0] for file in page.unpack("index")["files"]] == ["train-000002"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "r", steps=1)
    assert main([str(folder), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "x.html cannot be written" in capsys.readouterr().err


HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "]]><!--<script>",
    "\u2028document.title='owned'\u2029",
    "</textarea></style></title><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
    "javascript:alert(1)",
    "\x00\x1b[31m\u202ereversed",
)


def test_nothing_that_a_model_wrote_becomes_markup(tmp_path: Path, capsys):
    text = " ".join(HOSTILE)
    names = ("problem_id", "data_source", "ground_truth", "verdict", "extracted", "stop_reason", "infra_error")
    hostile = trajectory(turns=[(text, [(text, "error", text)])], **dict.fromkeys(names, text))
    hostile["prompt"] = [{"role": text, "content": text}]
    plain = written(capsys, write_run(tmp_path / "plain", steps=1, rows=[trajectory()]))
    folder = write_run(tmp_path / "hostile", steps=1, rows=[hostile], config={"note": text})
    page = written(capsys, folder)
    # The same elements with the same attributes, but for the row of the configuration that holds the text.
    assert [tag for tag, _ in page.tags if tag in ("script", "img", "svg", "iframe")] == [
        tag for tag, _ in plain.tags if tag in ("script", "img", "svg", "iframe")
    ]
    assert not any(name.startswith("on") for _, values in page.tags for name in values)
    assert page.records()[0]["turns"] == hostile["turns"]
    assert page.unpack("index")["words"]["verdict"] == [text[:80]]
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert source.lower().count("</script") == source.lower().count("<script")


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else(tmp_path: Path, capsys):
    folder = write_run(tmp_path / "r", steps=1)
    page = written(capsys, folder)
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    running = [values for tag, values in page.tags if tag == "script" and "type" not in values]
    assert len(re.findall(r"'sha256-[\w+/]+='", rules["script-src"])) == len(running)
    assert "unsafe" not in rules["script-src"] + rules["style-src"]
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)=""", source)


@pytest.mark.parametrize("script", sorted(WEB.glob("*.js")), ids=lambda path: path.name)
def test_our_scripts_read_no_text_as_markup(script: Path):
    source = script.read_text(encoding="utf-8")
    ways = r"\w+HTML\b|document\.write|createContextualFragment|DOMParser|\beval\b|\bFunction\("
    assert re.search(ways, source) is None
    assert source.startswith('"use strict";\n// ')


# --- runs compared


def test_a_comparison_tells_only_what_differs(tmp_path: Path, capsys):
    one = write_run(tmp_path / "a", steps=2, config={"lr": 1e-6, "same": [1, 2]})
    other = write_run(tmp_path / "b", steps=3, config={"lr": 2e-6, "same": [1, 2], "only": {"here": True}})
    facts = json.loads((other / runs.MANIFEST).read_text())
    (other / runs.MANIFEST).write_text(json.dumps({**facts, "versions": {"verl": "0.7.0"}}))
    assert main([str(one), str(other)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == one / "report-with-b.html"
    source = path.read_text(encoding="utf-8")
    cells = re.sub(r"\s*</?t[dr]>\s*", "|", source[source.index('<section id="tab-differences"') :])
    for row in ("|lr||1e-06||2e-06|", "|only.here||(not there)||true|", "|versions.verl||0.6.1||0.7.0|"):
        assert row in cells
    assert "trainer.total_training_steps||2||3|" in cells
    assert "same.|" not in cells
    assert "verl_ext.run_id" not in cells
    assert "no difference in 1" in source  # of the data
