"""The report in a real browser: no error, nothing fetched, every mark read out, axe's rules clean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real.parts import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LOOKS = [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]


def _dslaunch(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reports of a plan with three components, of 16,384 GPUs, of a search, and a diff."""
    need("vl_convert")
    folder = tmp_path_factory.mktemp("reports")
    _dslaunch(folder, "report", "recipe=vla70b", "cluster=64xA100", "-o", "vla.html")
    _dslaunch(
        folder,
        "report",
        "recipe=llama3_405b",
        "cluster=16384xH100",
        "engine.path=/megatron",
        "-o",
        "405b.html",
    )
    _dslaunch(folder, "report", "recipe=llama3_8b", "cluster=8xH100", "strategy=auto", "-o", "auto.html")
    sides = [
        "recipe=vla70b cluster=64xA100",
        "recipe=vla70b cluster=64xA100 strategy.llm.tp=4 strategy.llm.dp=4",
    ]
    (folder / "diff.html").write_text(_dslaunch(folder, "diff", *sides, "--format", "html"))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need("playwright", "chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"],
        )
        yield started
        started.close()


@pytest.fixture
def complaints() -> list[str]:
    """Errors of the console and of scripts, and what was fetched."""
    return []


def _open(
    browser: Browser, file: Path, width: int, scheme: str, complaints: list[str], *, lifted: bool = True
) -> Page:
    """The page; `lifted`: without its content security policy."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=lifted
    )  # type: ignore[arg-type]
    page = context.new_page()
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda sent: None if sent.url.startswith(("file:", "data:")) else complaints.append(sent.url),
    )
    page.goto(file.as_uri())
    return page


@pytest.mark.parametrize("name", ["vla", "405b", "auto", "diff"])
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_page_opens_from_disk_without_a_fault(
    name: str, width: int, scheme: str, reports: Path, browser: Browser, complaints: list[str]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = _open(browser, reports / f"{name}.html", width, scheme, complaints)
    for closed in page.query_selector_all("details:not([open]) > summary"):
        closed.click()
    assert Axe().run(page).response["violations"] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), (
        "the page scrolls sideways"
    )
    assert complaints == []


@pytest.mark.parametrize("name", ["vla", "diff"])
def test_a_pages_own_policy_blocks_nothing_that_it_needs(
    name: str, reports: Path, browser: Browser, complaints: list[str]
) -> None:
    """As a reader opens it: the other tests lift the policy, since axe's script is not the page's."""
    page = _open(browser, reports / f"{name}.html", 1200, "light", complaints, lifted=False)
    page.locator("summary").first.click()
    assert complaints == []


def test_every_mark_says_what_it_is_to_pointer_and_keyboard(
    reports: Path, browser: Browser, complaints: list[str]
) -> None:
    page = _open(browser, reports / "vla.html", 1200, "light", complaints)
    for plot in page.query_selector_all(".plot"):
        marks = plot.query_selector_all("path[aria-label], line[aria-label]")
        assert len(marks) >= 3
        plot.scroll_into_view_if_needed()
        plot.focus()
        page.wait_for_timeout(200)  # scrolling hides what the pointer showed, a frame later
        seen = set()
        for _ in range(min(len(marks), 40)):
            page.keyboard.press("ArrowRight")
            seen.add(page.inner_text("#tip"))
            assert page.is_visible("#tip")
        assert len(seen) >= 3
        page.keyboard.press("Escape")
        assert not page.is_visible("#tip")
    bar = page.query_selector("#memory path[aria-label*='stage 1: gradients']")
    assert bar is not None
    bar.hover()
    assert re.fullmatch(r"llm stage 1: gradients [\d.]+ GiB", page.inner_text("#tip"))
    page.mouse.move(1, 1)
    assert not page.is_visible("#tip")
    assert complaints == []


def test_dark_and_light_differ_and_plots_follow(
    reports: Path, browser: Browser, complaints: list[str]
) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page = _open(browser, reports / "vla.html", 1200, scheme, complaints)
        script = "getComputedStyle(document.querySelector('#memory path[aria-label]')).fill"
        colours.append(
            (page.evaluate(script), page.evaluate("getComputedStyle(document.body).backgroundColor"))
        )
    (fill, paper), (dark_fill, dark_paper) = colours
    assert fill != dark_fill
    assert paper != dark_paper


def test_nothing_moves_after_the_page_is_shown(
    reports: Path, browser: Browser, complaints: list[str]
) -> None:
    page = _open(browser, reports / "vla.html", 390, "light", complaints)
    shift = page.evaluate(
        "new Promise(done => { let sum = 0; new PerformanceObserver(list => { for (const e of list.getEntries()) "
        "sum += e.value; }).observe({type: 'layout-shift', buffered: true}); setTimeout(() => done(sum), 500); })"
    )
    assert shift == 0


def test_it_prints(reports: Path, browser: Browser, complaints: list[str]) -> None:
    page = _open(browser, reports / "vla.html", 1200, "light", complaints)
    page.emulate_media(media="print")
    assert not page.is_visible("nav")
    assert len(page.pdf(format="A4")) > 20_000
    page.set_viewport_size({"width": 700, "height": 900})
    assert page.evaluate(
        "[...document.querySelectorAll('.plot svg')].every(s => s.getBoundingClientRect().right <= 700)"
    )


@pytest.mark.slow
def test_a_real_run_is_listed_compared_and_reported(
    tmp_path: Path, browser: Browser, complaints: list[str]
) -> None:
    need("torch", "sklearn", "vl_convert")
    words = ["recipe=vla_tiny", "cluster=local", "strategy=ddp", "training.steps=6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "dslaunch", *words], cwd=tmp_path, env=environment, timeout=300, check=True
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert "finished" in _dslaunch(tmp_path, "runs")
    assert "step 6/6" in _dslaunch(tmp_path, "runs")
    assert "lowest_loss" in _dslaunch(tmp_path, "compare", str(run), str(run))
    _dslaunch(tmp_path, "report", str(run), "-o", "run.html")
    page = _open(browser, tmp_path / "run.html", 1200, "light", complaints)
    assert page.query_selector_all("#run path[aria-label^='step 6:']")
    assert complaints == []
