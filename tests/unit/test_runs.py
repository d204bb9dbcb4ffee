"""`dslaunch runs` and `dslaunch compare`: what ran, how it went, and what was different."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dslaunch.run.processes import Process
from dslaunch.run.state import State, write_state
from tests.command import CommandLine, valid


@pytest.fixture
def shelf(dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, the second with another micro-batch; one wrote metrics."""
    monkeypatch.chdir(tmp_path)
    for age, (name, more) in enumerate([("first", []), ("second", ["training.micro_batch=2"])]):
        folder = tmp_path / "runs" / name
        dslaunch("render", "recipe=vla_tiny", "cluster=local", *more, "-o", str(folder))
        write_state(folder, State(name, "local", "finished" if age else "failed", exit_status=1 - age))
        os.utime(folder / "state.json", (1e9 + age, 1e9 + age))
    rows = [
        {"step": n, "loss": 4.0 / n, "grad_norm": 1.0, "lr": 1e-3, "samples_per_s": 8.0, "tokens_per_s": 100.0 * n,
         "memory_gib": 0.5, "memory_kind": "host_peak_rss", "step_time_s": 1.0 / n}
        for n in range(1, 5)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "runs" / "second" / "metrics.jsonl").write_text(text)
    return tmp_path / "runs"


def test_runs_lists_the_last_one_first_with_its_figures(shelf: Path, dslaunch: CommandLine) -> None:
    first, second = dslaunch("runs").out.splitlines()
    assert first.split()[:2] == ["second", "finished"]
    assert "step 4/" in first
    assert "loss 1 " in first
    assert "350 tokens/s" in first
    assert second.split()[:2] == ["first", "failed"]
    assert "nothing measured" in second


def test_runs_as_json(shelf: Path, dslaunch: CommandLine) -> None:
    found = dslaunch("runs", f"run.root={shelf}", "--json").json
    assert found["schema"] == "dslaunch.runs/1"
    second, first = found["runs"]
    assert (second["steps_done"], second["lowest_loss"], second["tokens_per_s"]) == (4, 1.0, 350.0)
    assert (first["state"], first["exit_status"], first["last_loss"]) == ("failed", 1, None)


def test_a_run_whose_supervisor_is_gone_is_not_running(shelf: Path, dslaunch: CommandLine) -> None:
    gone = Process(pid=2**22 - 1, pgid=2**22 - 1, start_time=1)
    write_state(shelf / "first", State("first", "local", "running", supervisor=gone))
    (shelf / "first" / "ranks").mkdir()
    (shelf / "first" / "ranks" / "0.exit").write_text("running\n")
    (shelf / "first" / "ranks" / "0.step").write_text("7\n")
    found = {Path(run["run"]).name: run for run in dslaunch("runs", "--json").json["runs"]}
    assert (found["first"]["state"], found["first"]["steps_done"]) == ("lost", 7)


def test_json_is_what_its_schema_says(shelf: Path, dslaunch: CommandLine) -> None:
    valid(dslaunch("compare", *map(str, shelf.iterdir()), "--json").json, "dslaunch.compare/1", dslaunch)
    (shelf / "first" / "plan.json").write_text("{")
    valid(dslaunch("runs", "--json").json, "dslaunch.runs/1", dslaunch)


def test_a_run_that_cannot_be_read_is_named_and_stops_nothing(shelf: Path, dslaunch: CommandLine) -> None:
    (shelf / "first" / "plan.json").write_text("{")
    ran = dslaunch("runs")
    assert ran.status == 0
    assert [line.split()[0] for line in ran.out.splitlines()[:2]] == ["second", "first"]
    assert "unreadable" in ran.out
    assert "not JSON" in ran.out
    broken = dslaunch("compare", str(shelf / "first"), str(shelf / "second"))
    assert (broken.status, "not JSON" in broken.err) == (2, True)


def test_no_runs_is_no_mistake(dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("runs", f"run.root={tmp_path / 'none'}")
    assert (ran.status, ran.out) == (0, "")
    assert "no runs" in ran.err
    assert dslaunch("runs", f"run.root={tmp_path}", "--json").json["runs"] == []


def test_compare_puts_figures_and_different_keys_side_by_side(shelf: Path, dslaunch: CommandLine) -> None:
    words = ["compare", str(shelf / "first"), str(shelf / "second")]
    rows = {line.split("  ")[0]: line.split() for line in dslaunch(*words).out.splitlines()}
    assert rows["state"][1:] == ["failed", "finished"]
    assert rows["layout of llm"].count("x") == 4, "its batch, a run"
    assert "components.llm.micro_batch" not in rows, "which the layout says"
    assert "training.lr" not in rows
    found = dslaunch(*words, "--json").json
    assert found["schema"] == "dslaunch.compare/1"
    assert found["differences"]["components.llm.micro_batch"][1] == 2
    assert not any(key.endswith(".stages") for key in found["differences"])


def test_compare_folds_each_cell_inside_its_column(
    shelf: Path, dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = dslaunch("compare", str(shelf / "first"), str(shelf / "second")).out.splitlines()
    assert max(map(len, lines)) <= 80
    second = lines[0].index("second")
    assert all(line[second - 1 : second] in ("", " ") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "one"], "two runs or more, found 1"),
        (["compare", "nowhere", "nowhere"], "holds no state.json"),
        (["runs", "training.steps=2"], "runs takes run.root=DIR alone"),
        (["runs", "somewhere"], "takes no other words"),
    ],
)
def test_mistakes_are_answered(words: list[str], said: str, dslaunch: CommandLine) -> None:
    ran = dslaunch(*words)
    assert ran.status == 2
    assert said in ran.err
