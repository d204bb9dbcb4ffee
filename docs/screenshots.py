"""Takes docs/images anew: `python docs/screenshots.py`, with dslaunch[report], playwright and chromium there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
REPORTS = {
    "report-vla70b": ["recipe=vla70b", "cluster=64xA100"],
    "report-llama3-405b": ["recipe=llama3_405b", "cluster=16384xH100", "engine.path=/opt/Megatron-LM"],
}
SECTIONS = {
    "report-vla70b": {"time": "#time"},
    "report-llama3-405b": {"ranks": "#ranks"},
}
"""Parts that get a picture of their own beside that of the page's beginning."""
WIDTH, HEIGHT = 1200, 1500


def main() -> None:
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        for name, words in REPORTS.items():
            file = Path(folder) / f"{name}.html"
            subprocess.run([sys.executable, "-m", "dslaunch", "report", *words, "-o", str(file)], check=True)
            page.goto(file.as_uri())
            page.screenshot(path=IMAGES / f"{name}.png")
            for part, selector in SECTIONS[name].items():
                page.locator(selector).screenshot(path=IMAGES / f"{name}-{part}.png")
        browser.close()


if __name__ == "__main__":
    main()
