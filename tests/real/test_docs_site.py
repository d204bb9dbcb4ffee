"""The site of `make docs`: built strictly, read in a real browser without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dslaunch.arguments import VERBS
from dslaunch.rules.registry import rules
from tests.real.parts import need

ROOT = Path(__file__).parents[2]


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_reference_holds_every_verb_rule_and_schema(site: Path) -> None:
    verbs = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert all(f'id="{verb}"' in verbs for verb in VERBS)
    assert all((site / "rules" / f"{rule_id}.html").is_file() for rule_id in rules())
    keys = (site / "reference" / "keys.html").read_text(encoding="utf-8")
    for key in ("training.global_batch", "launcher.slurm.time", "cluster.gpu.hbm_gb_per_s", "model.edges.0.join"):
        assert f"<code>{key}</code>" in keys
    assert "GB/s (1e9), one way per GPU" in keys
    assert (site / "reference" / "schemas" / "dslaunch.plan-1.json").is_file()


def test_links_to_rules_lead_to_pages_of_the_site(site: Path) -> None:
    text = (site / "rules.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(rules/[^"#]+)"', text)
    assert len(links) >= len(rules())
    assert all((site / link).is_file() for link in links)


def test_pages_are_read_without_a_network(address: str) -> None:
    need("playwright", "chromium")
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)  # a busy machine
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index", "tutorial", "claims", "runtime", "reference/keys", "why/parallelism"):
            page.goto(f"{address}/{name}.html")
            assert page.locator("h1").first.is_visible()
        page.locator("input.md-search__input").fill("ZeRO-2")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
