"""What there is, as columns: a line each for a pipe, folded for a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.review.columns import lines
from tests.command import CommandLine, make_site

ROWS = [("short", "0.3B", "some words of a description that goes on for a while"), ("x" * 40, "7B", "end")]


def test_a_pipe_gets_a_line_each_and_a_long_cell_widens_no_other_line() -> None:
    assert lines(ROWS, None) == [
        "short  0.3B  some words of a description that goes on for a while",
        "x" * 40 + "  7B    end",
    ]


def test_a_terminal_gets_what_goes_on_under_its_column() -> None:
    assert lines(ROWS, 52) == [
        "short  0.3B  some words of a description that goes",
        "             on for a while",
        "x" * 40 + "  7B    end",
    ]
    assert lines(ROWS[:1], 30)[1:] == ["    description that goes on", "    for a while"]


def test_a_list_of_names_leaves_out_what_a_terminal_does_not_hold() -> None:
    assert lines(ROWS, 52, cut=True) == [
        "short  0.3B  some words of a description that goe...",
        "x" * 40 + "  7B    end",
    ]


@pytest.mark.parametrize("verb", ["models", "clusters", "recipes"])
def test_a_line_each_on_a_narrow_terminal(
    verb: str, dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = dslaunch(verb).out.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    shown = dslaunch(verb).out.splitlines()
    assert max(map(len, shown)) <= 80
    assert [line.split()[0] for line in shown] == [line.split()[0] for line in piped]


@pytest.mark.parametrize("verb", ["schema training"])
@pytest.mark.parametrize("columns", [80, 200])
def test_no_line_is_wider_than_the_terminal(
    verb: str, columns: int, dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = dslaunch(verb).out.splitlines()
    assert max(map(len, found)) <= columns
    monkeypatch.delenv("COLUMNS")
    piped = dslaunch(verb).out.splitlines()
    assert len(piped) <= len(found)
    assert ["".join(line.split()) for line in piped] == _joined(found)


def _joined(folded: list[str]) -> list[str]:
    """Lines that go on (they start with spaces) put together again."""
    rows: list[str] = []
    for line in folded:
        if line.startswith("    "):
            rows[-1] += line
        else:
            rows.append(line)
    return ["".join(row.split()) for row in rows]


@pytest.mark.parametrize("text", ["name: odd\ncomponents: {llm: {arch: decoder}}\n", "a: [b\n", "- one\n"])
@pytest.mark.parametrize("kind", ["model", "cluster"])
def test_a_file_that_is_not_valid_is_listed_as_such(
    kind: str, text: str, dslaunch: CommandLine, tmp_path: Path
) -> None:
    folder = make_site(tmp_path / "site") / "conf" / kind
    folder.mkdir(exist_ok=True)
    (folder / "odd.yaml").write_text(text)
    ran = dslaunch(f"{kind}s", "--config-dir", str(tmp_path / "site"))
    assert ran.status == 0, ran.err
    (row,) = [line for line in ran.out.splitlines() if line.startswith("odd ")]
    assert "not valid: " in row
    assert len(ran.out.splitlines()) > 20
