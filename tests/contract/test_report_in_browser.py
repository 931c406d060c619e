"""A report opened in a real browser, without a window: it loads, filters, opens, and runs nothing that a model wrote.

Needs the system's chromium or Chrome (Debian: apt-get install chromium); skipped without one, which the CI has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import trajectory, write_run

from verl_ext.report.__main__ import main

pytest.importorskip("playwright.sync_api", reason="playwright is not installed here: invoke setup")
from playwright.sync_api import Browser, Page, sync_playwright

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or Chrome on PATH: apt-get install chromium")

PATIENCE_MS = 120_000  # of a machine that does ten other things
OWNED = "document.title = 'owned'; window.owned = true"
HOSTILE = (
    f'</script><script>{OWNED}</script> <img src=x onerror="{OWNED}"> ]]> <!-- <script> {{{{ 7*7 }}}} '
    f'<svg onload="{OWNED}"></svg> <a href="javascript:{OWNED}">x</a> \u2028{OWNED}\u2029 \u202egnihtemos'
)
NAMES = ("problem_id", "ground_truth", "verdict", "extracted", "stop_reason")
STEPS, SAMPLES = 3, 4


class Opened:
    """A page with what went wrong on it: console errors, exceptions, requests, dialogs."""

    def __init__(self, browser: Browser, path: Path, address: str = "", scheme: str = "light") -> None:
        self.page: Page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        self.page.set_default_timeout(PATIENCE_MS)
        self.wrong: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._requested)
        self.page.goto(path.as_uri() + address)

    def _said(self, message) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _requested(self, request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.wrong.append(f"request of {request.url}")

    def shown(self) -> str:
        return self.page.locator("#shown").inner_text()

    def until_shown(self, text: str) -> None:
        self.page.wait_for_function("text => document.getElementById('shown').textContent.startsWith(text)", arg=text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield browser
        browser.close()


def rows() -> list[dict]:
    code = "total = sum(range(10))  # a sum\nprint('is', total)"
    right = trajectory("sum", turns=[("I add.", [(code, "ok", "is 45")]), ("It is \\boxed{42}.", ())])
    wrong = trajectory("sum", reward=-0.5, accuracy=0.0, verdict="different", extracted="41")
    failed = trajectory("sum", reward=-1.0, accuracy=0.0, verdict="no_answer", extracted="", stop_reason="length",
                        turns=[("I try.", [("1/0", "error", "ZeroDivisionError: division by zero")])] * 3)  # fmt: skip
    hostile = trajectory("h", turns=[(HOSTILE, [(HOSTILE, "error", HOSTILE)]), (f"```python\n{HOSTILE}\n```", ())])
    hostile |= dict.fromkeys(NAMES, HOSTILE) | {"prompt": [{"role": "user", "content": HOSTILE}]}
    return [right, wrong, failed, hostile]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "r", steps=STEPS, rows=rows())
    assert main([str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Opened]:
    opened = Opened(browser, report, "#trajectories")
    opened.page.wait_for_selector("html[data-ready=true]", state="attached")
    yield opened
    assert opened.wrong == []
    opened.page.close()


def choose(opened: Opened, place: int) -> None:
    opened.page.locator("#list .row").nth(place).click()
    opened.page.locator(".pane").first.wait_for()


def test_it_loads_and_draws_its_curves_in_light_and_dark(browser: Browser, report: Path):
    looks = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, report, scheme=scheme)
        opened.page.wait_for_selector("html[data-ready=true]", state="attached")
        opened.page.locator(".plot .scatterlayer .trace").first.wait_for()
        titles = opened.page.locator("figure figcaption strong").all_inner_texts()
        assert {"Reward", "Accuracy", "Time of a step", "Any other number"} <= set(titles)
        ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
        looks[scheme] = opened.page.evaluate(f"[getComputedStyle(document.body).backgroundColor, {ink}]")
        assert opened.wrong == []
        opened.page.close()
    assert looks["light"][0] != looks["dark"][0]
    assert looks["light"][1] != looks["dark"][1]


def test_another_colour_scheme_redraws_what_is_there(browser: Browser, report: Path):
    opened = Opened(browser, report)
    tick = opened.page.locator(".plot .xtick text").first
    tick.wait_for()
    before = tick.evaluate("element => getComputedStyle(element).fill")
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_function(
        "before => getComputedStyle(document.querySelector('.plot .xtick text')).fill !== before", arg=before
    )
    assert opened.wrong == []
    opened.page.close()


def test_filters_narrow_the_list_and_reset_widens_it(opened: Opened):
    every = (STEPS + 1) * SAMPLES
    opened.until_shown(f"{every} of {every}")
    for name, value, left in (
        ("kind", "1", SAMPLES), ("step_min", "2", 2 * SAMPLES), ("step_max", "1", 2 * SAMPLES),
        ("reward_max", "-0.5", 2 * (STEPS + 1)), ("reward_min", "1", 2 * (STEPS + 1)),
        ("turns_min", "3", STEPS + 1), ("turns_max", "1", STEPS + 1), ("right", "0", 2 * (STEPS + 1)),
        ("fault", "1", 2 * (STEPS + 1)), ("fault", "0", 2 * (STEPS + 1)), ("words", "no_answer", STEPS + 1),
    ):  # fmt: skip
        field = opened.page.locator(f"#filters [name={name}]")
        if field.evaluate("element => element.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
        opened.until_shown(f"{left} of {every}")
        assert opened.page.locator("#list .row").count() == left, name
        opened.page.locator("#filters button[type=reset]").click()
        opened.until_shown(f"{every} of {every}")


def test_the_search_in_texts_finds_what_no_column_holds(opened: Opened):
    words = opened.page.locator("#filters [name=words]")
    words.fill("zerodivisionERROR")
    opened.until_shown("0 of 16 by their columns")
    opened.page.locator("#search-texts").click()
    opened.until_shown("4 of 16 with these words")
    kind = opened.page.locator("#filters [name=kind]")
    kind.select_option("1")  # fewer than were searched: what was found stays known
    opened.until_shown("1 of 16 with these words")
    words.fill("sum(range(10))  # a sum")
    words.press("Enter")
    opened.until_shown("1 of 16 with these words")
    kind.select_option("")  # more than were searched
    opened.until_shown("0 of 16 by their columns; Enter looks into the texts")


def test_columns_sort_both_ways(opened: Opened):
    head = opened.page.locator("#list-head .reward")
    first = opened.page.locator("#list .row .reward").first
    head.click()
    assert first.inner_text() == "\N{MINUS SIGN}1.00"
    head.click()
    assert first.inner_text() == "1.00"


def test_a_trajectory_opens_with_its_conversation(opened: Opened):
    opened.page.locator("#filters [name=kind]").select_option("0")
    choose(opened, 0)
    pane = opened.page.locator(".pane")
    assert pane.locator(".badge").inner_text() == "right"
    assert "the answer is the known one" in pane.locator(".verdict").inner_text()
    assert pane.locator("article.prompt .prose").inner_text() == "What is 6 x 7? (sum)"
    assert pane.locator("article.trained").count() == 2
    assert pane.locator("article.tool .output").inner_text() == "is 45"
    assert pane.locator("article.tool header").inner_text().split("\n")[-1] == "5 tokens masked"
    code = pane.locator("article.trained .code").first
    assert code.locator(".comment").all_inner_texts() == ["# a sum"]
    assert code.locator(".string").all_inner_texts() == ["'is'"]
    assert code.locator(".name").all_inner_texts() == ["sum", "range", "print"]
    assert pane.locator("mark").inner_text() == "\\boxed{42}"
    assert pane.locator(".mask span").evaluate_all("all => all.map(one => one.className)") == ["on", "off", "on"]


def test_the_keys_go_through_the_list(opened: Opened):
    opened.page.locator("#list-body").focus()
    for _ in range(2):
        opened.page.keyboard.press("ArrowDown")
    opened.page.wait_for_function("() => location.hash === '#trajectories=val-000000/1'")
    assert opened.page.locator(".row[aria-selected=true]").count() == 1


def test_two_samples_of_a_prompt_stand_side_by_side(opened: Opened):
    choose(opened, SAMPLES)  # the first of step 1
    opened.page.get_by_role("button", name="beside another sample").click()
    opened.page.locator(".pane").nth(1).wait_for()
    badges = opened.page.locator(".pane .badge").all_inner_texts()
    assert badges == ["right", "wrong"]
    assert "no answer was found" in opened.page.locator(".pane").nth(1).inner_text()
    opened.page.locator(".pane").nth(1).locator(".chip").nth(1).click()
    opened.page.wait_for_function("() => location.hash === '#trajectories=train-000001/0&train-000001/1'")


def test_an_address_opens_what_it_names(browser: Browser, report: Path):
    opened = Opened(browser, report, "#trajectories=train-000002/2&train-000002/0")
    opened.page.locator(".pane").nth(1).wait_for()
    assert opened.page.locator(".pane header strong").first.inner_text() == "step 2, training"
    assert opened.page.locator(".pane .badge").all_inner_texts() == ["wrong", "right"]
    assert opened.wrong == []
    opened.page.close()


def test_what_a_model_wrote_is_shown_and_never_run(opened: Opened):
    title = opened.page.title()
    opened.page.locator("#filters [name=step_min]").fill("3")
    choose(opened, 3)
    pane = opened.page.locator(".pane")
    pane.locator("details summary").first.click()
    assert opened.page.evaluate("window.owned") is None
    assert opened.page.title() == title
    assert pane.locator("script, img, svg, a, iframe, style").count() == 0
    shown = pane.locator(".prose, .code, .output, .reason, dd")
    texts = shown.evaluate_all("all => all.map(one => one.textContent)")
    assert texts.count(HOSTILE) >= 6  # prompt, turn, its code, its output, as written, verdict, answers
    opened.page.locator("#list .row").first.wait_for()
    assert opened.page.locator("#viewer script, #viewer img, #viewer svg").count() == 0


def test_the_page_would_run_no_foreign_script_even_if_it_got_one(browser: Browser, report: Path):
    opened = Opened(browser, report)
    opened.page.wait_for_selector("html[data-ready=true]", state="attached")
    opened.page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", HOSTILE)
    opened.page.evaluate("""() => {
      const script = document.createElement('script');
      script.textContent = 'window.owned = true';
      document.body.append(script);
    }""")
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.owned") is None
    assert any("Content Security Policy" in said for said in opened.wrong)
    opened.page.close()


def test_a_comparison_loads_with_both_runs(browser: Browser, report: Path, tmp_path: Path):
    other = write_run(tmp_path / "other", steps=2, rows=rows()[:2], config={"lr": 1})
    out = tmp_path / "both.html"
    assert main([str(report.parent), str(other), "--out", str(out)]) == 0
    opened = Opened(browser, out, "#differences")
    assert "lr" in opened.page.locator("#tab-differences").inner_text()
    opened.page.get_by_role("tab", name="Overview").click()
    opened.page.locator(".plot .legend .groups").first.wait_for()
    groups = opened.page.locator(".plot").first.locator(".legendtext").all_text_contents()
    assert groups.count("training") == 2
    assert opened.wrong == []
    opened.page.close()
