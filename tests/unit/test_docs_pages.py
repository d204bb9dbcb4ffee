"""What runs the pages: it sees what is wrong in one, and mends figures alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import CommandLine
from tests.pages import Folder, refreshed

FENCE = "```"


@pytest.fixture
def folder(dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path, dslaunch, {"sbatch": "no SLURM"}, {})


def _page(*blocks: tuple[str, str]) -> str:
    return "\n".join(f"{FENCE}{language}\n{text}\n{FENCE}\n" for language, text in blocks)


def test_what_is_right_stays(folder: Folder) -> None:
    page = _page(
        ('yaml title="site/a.yaml"', "b: 1"), ("bash", "cat site/a.yaml\nsbatch never"), ("text", "b: 1"),
        ("python", "x = 2"), ("python", "print(x)\nprint('end')"), ("text", "2\n..."),
        ("bash", "dslaunch schema training.steps"), ("text", "training.steps  int  1000  Optimizer steps.\n..."),
    )  # fmt: skip
    assert refreshed(page, folder) == page


def test_figures_are_written_anew(folder: Folder) -> None:
    page = _page(("python", "print('before'); print('7.25 GiB of 80')"), ("text", "...\n3.1 GiB of 76"))
    assert "7.25 GiB of 80" in refreshed(page, folder)


@pytest.mark.parametrize(
    ("block", "shown", "said"),
    [
        (("python", "print('other words')"), "these words", "no line like this is printed"),
        (("python", "print('second\\nfirst')"), "first\nsecond", "no line like this is printed"),
        (("bash", "dslaunch schema nosuch"), "", "ends with 2, not 0"),
        (("bash", "dslaunch schema training # exit status 3"), "", "ends with 0, not 3"),
        (("bash", "false"), "", "ends with 1, not 0"),
    ],
)
def test_what_is_wrong_is_said(block: tuple[str, str], shown: str, said: str, folder: Folder) -> None:
    with pytest.raises(AssertionError, match=said):
        refreshed(_page(block, ("text", shown)), folder)


def test_a_table_is_made_of_the_plans_before_it(folder: Folder) -> None:
    plans = [f"dslaunch plan recipe=llama3_8b cluster=8xA100 strategy={name}" for name in ("ddp", "zero3")]
    page = _page(("bash", "\n".join(plans))) + "\n<!-- figures: fits layout -->\nold\n<!-- end -->\n"
    fresh = refreshed(page, folder)
    assert f"{plans[0]} # exit status 3\n{plans[1]}\n" in fresh
    assert "| `strategy=ddp` | no | DP8 DDP |\n| `strategy=zero3` | yes | DP8 ZeRO-3 |\n<!-- end -->" in fresh
    assert refreshed(fresh, folder) == fresh


def test_a_plan_that_is_refused_ends_the_page(folder: Folder) -> None:
    page = _page(("bash", "dslaunch plan recipe=nosuch")) + "\n<!-- figures: fits -->\n<!-- end -->\n"
    with pytest.raises(AssertionError, match="no such recipe"):
        refreshed(page, folder)
