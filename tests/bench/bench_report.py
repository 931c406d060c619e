"""What a report of 50,000 trajectories costs: `python tests/bench/bench_report.py [--trajectories N] [--max-mb N]`.

Steps of the recipe's size (128 prompts, 8 samples each), 4,096 tokens a trajectory in three turns with two calls. One
step's file is made, its words drawn at random from the shipped questions (harder to compress than what a model says);
the others are links to it. The report is written with no limit on the texts unless --max-mb gives one, and opened in
chromium, where there is one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import on_path  # noqa: F401
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from run_folders import step_metrics, trajectory, write_run

from verl_ext.report.__main__ import main as write_report
from verl_ext.runs import METRICS
from verl_ext.trajectory import ROLLOUTS, write_records

SAMPLE = Path(__file__).resolve().parents[2] / "recipe" / "retool" / "samples" / "dapo_sample.parquet"
PROMPTS, SAMPLES, TOKENS, CHARACTERS_A_TOKEN = 128, 8, 4096, 3.6
CODE_CHARS, OUTPUT_CHARS = 600, 300


def rows() -> list[dict]:
    generator = random.Random(1)
    prompts = pq.read_table(SAMPLE).column("prompt").to_pylist()
    words = [word for prompt in prompts for word in prompt[0]["content"].split()]

    def text(chars: float) -> str:
        return " ".join(generator.choices(words, k=int(chars / 4)))

    made = []
    for prompt in range(PROMPTS):
        question = [{"role": "user", "content": text(900)}]
        for sample in range(SAMPLES):
            own = (TOKENS * CHARACTERS_A_TOKEN - 2 * (CODE_CHARS + OUTPUT_CHARS)) / 3
            call = [(text(CODE_CHARS), "ok" if generator.random() < 0.8 else "error", text(OUTPUT_CHARS))]
            right = generator.random() < 0.5
            made.append(trajectory(
                f"problem-{prompt:05d}", turns=[(text(own), call), (text(own), call), (text(own), ())],
                trajectory_id=f"train-1-problem-{prompt:05d}-{sample}", prompt=question,
                extracted=str(generator.randrange(999)),
                reward=1.0 if right else -0.8, accuracy=float(right), verdict="equal" if right else "different",
            ))  # fmt: skip
    return made


def make_run(folder: Path, trajectories: int) -> Path:
    run = write_run(folder, steps=0)
    first = write_records(run, 1, False, rows())
    steps = max(1, round(trajectories / (PROMPTS * SAMPLES)))
    for step in range(2, steps + 1):
        (run / ROLLOUTS / f"train-{step:06d}.parquet").symlink_to(first)
    lines = [{"step": step, "time_s": 60.0 * step, "data": step_metrics(step)} for step in range(1, steps + 1)]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def in_browser(path: Path) -> dict[str, float]:
    """Seconds of what a person does, in chromium; MB of the page's memory."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--enable-precise-memory-info"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(400_000)
        started_s = time.monotonic()

        def note(name: str) -> None:
            nonlocal started_s
            found[name] = time.monotonic() - started_s
            started_s = time.monotonic()

        page.goto(path.as_uri() + "#trajectories", wait_until="commit")
        page.wait_for_selector("html[data-ready=true]", state="attached")
        note("load, until everything can be used")
        page.locator("#filters [name=fault]").select_option("1")
        page.wait_for_function("() => !document.getElementById('shown').textContent.startsWith('0')")
        note("filter by a tool error")
        page.locator("#list-head .reward").click()
        page.locator("#list .row").first.wait_for()
        note("sort by reward")
        page.locator("#list .row").nth(3).click()
        page.locator(".pane article").first.wait_for()
        note("open a trajectory")
        page.get_by_role("button", name="beside another sample").click()
        page.locator(".pane").nth(1).wait_for()
        note("open another sample beside it")
        page.locator("#filters button[type=reset]").click()
        page.locator("#filters [name=words]").fill("a text that is nowhere")
        page.locator("#filters [name=words]").press("Enter")
        page.wait_for_function("() => document.getElementById('shown').textContent.includes('with these words')")
        note("search all texts")
        found["MB of JavaScript's memory then"] = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=50_000)
    parser.add_argument("--max-mb", type=int, default=100_000)
    parser.add_argument("--folder", default=None, help="where to work; removed after")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = make_run(Path(folder) / "run", options.trajectories)
        records_mb = sum(path.stat().st_size for path in (run / ROLLOUTS).glob("*")) / 1e6
        started_s = time.monotonic()
        assert write_report([str(run), "--max-mb", str(options.max_mb)]) == 0
        table = Table("what", "", title=f"Report of about {options.trajectories:,} trajectories of {TOKENS:,} tokens")
        table.add_row("records on disk, MB", f"{records_mb:,.0f}")
        table.add_row("writing, s", f"{time.monotonic() - started_s:.1f}")
        table.add_row("file, MB", f"{(run / 'report.html').stat().st_size / 1e6:,.0f}")
        if shutil.which("chromium"):
            for name, value in in_browser(run / "report.html").items():
                table.add_row(name if "MB" in name else f"{name}, s", f"{value:.2f}")
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
