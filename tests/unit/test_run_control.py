"""What `status`, `logs` and `watch` tell of a run folder, without any job running."""

from __future__ import annotations

import io
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dslaunch.errors import ConfigError
from dslaunch.planfile import to_json
from dslaunch.review.watch import page
from dslaunch.run.attempts import attempt_of, begin_attempt, logs_of
from dslaunch.run.checkpoints import newest_checkpoint
from dslaunch.run.find import find_run, run_and_root
from dslaunch.run.logs import find_log, log_object, show
from dslaunch.run.now import look
from dslaunch.run.processes import Process, identify
from dslaunch.run.state import State, append_event, read_events, read_state, write_state
from dslaunch.run.status import read_status, status_lines, status_object
from tests.launching import make_plan

HERE = socket.gethostname()
NOBODY = Process(pid=2**22 - 1, pgid=2**22 - 1, start_time=1)
"""Above the largest process id that Linux gives by default."""


def make_run(root: Path, name: str = "tiny-1", nodes: int = 1, gpus: int = 2, **state: object) -> Path:
    """A run folder that has been launched."""
    folder = root / name
    (folder / "logs").mkdir(parents=True)
    (folder / "ranks").mkdir()
    plan = make_plan(nodes, gpus)
    (folder / "plan.json").write_text(to_json(replace(plan, training=replace(plan.training, steps=100))))
    (folder / "manifest.json").write_text("{}")
    write_state(folder, State(name, "local", **{"status": "running", **state}))  # type: ignore[arg-type]
    return folder


def put(folder: Path, rank: int, *, status: str = "running", step: str = "", at: int = 0) -> None:
    """The records of one rank; `at` is when it changed, in seconds."""
    ranks = folder / "ranks"
    (ranks / f"{rank}.exit").write_text(status + "\n")
    os.utime(ranks / f"{rank}.exit", (at, at))
    (ranks / f"{rank}.pid").write_text('{"host": "n1", "pid": 1, "pgid": 1, "start_time": 0}\n')
    if step:
        (ranks / f"{rank}.step").write_text(step + "\n")
        os.utime(ranks / f"{rank}.step", (at, at))


def myself() -> Process:
    found = identify(os.getpid())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("state", "standing"),
    [
        ({"status": "prepared"}, "prepared"),
        ({"supervisor": myself(), "process": NOBODY, "host": HERE}, "running"),
        ({"supervisor": NOBODY, "process": myself(), "host": HERE}, "unsupervised"),
        ({"supervisor": NOBODY, "process": NOBODY, "host": HERE}, "lost"),
        ({"supervisor": myself(), "host": "elsewhere"}, "unknown"),
        ({"supervisor": replace(myself(), start_time=1), "host": HERE}, "lost"),
        ({"status": "failed", "supervisor": myself(), "host": HERE}, "failed"),
    ],
)
def test_a_state_is_held_against_the_processes_that_it_names(
    state: dict[str, object], standing: str, tmp_path: Path
) -> None:
    assert look(make_run(tmp_path, **state)).standing == standing


def test_how_far_and_how_fast_a_run_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path, gpus=4, supervisor=myself(), host=HERE)
    put(folder, 0, step="30 10 1000.0", at=1010)
    put(folder, 1, step="29 10 1000.0", at=1010)
    put(folder, 2, step="27", at=1005)
    found = status_object(read_status(folder))
    assert (found["step"], found["steps"], found["behind"]) == (27, 100, [2])
    assert found["steps_per_s"] == pytest.approx(1.9)
    assert found["ranks"][2]["steps_per_s"] is None
    told = dict(status_lines(read_status(folder)))
    assert told["step"].startswith("27 of 100, 1.9 steps/s")
    assert told["ranks"] == "3 of 4 started: 3 running"


def test_the_first_failure_is_not_one_that_a_launcher_ended_afterwards(tmp_path: Path) -> None:
    folder = make_run(tmp_path, gpus=4, status="failed")
    append_event(folder, "failed", why="rank 3 exits 9")
    for rank, status, at in ((0, "143", 10), (1, "1", 13), (2, "0", 5), (3, "9", 12)):
        put(folder, rank, status=status, at=at)
        (folder / "logs" / f"rank-{rank}.log").write_text(f"said by {rank}\n")
    found = status_object(read_status(folder))
    assert found["first_failure"] == {"rank": 3, "host": "n1", "exit_status": 9, "ended_at": 12.0}
    assert found["why"] == "rank 3 exits 9"
    log = find_log(folder, None, None, first_error=True)
    assert log_object(folder, log, 5)["lines"] == ["said by 3"]
    assert [each.rank for each in log.failures] == [3, 1, 0]


@pytest.mark.parametrize(
    ("lines", "shown"), [(0, "a\nb\n\nc"), (1, "c"), (2, "\nc"), (3, "b\n\nc"), (9, "a\nb\n\nc")]
)
def test_the_last_lines_of_a_log(lines: int, shown: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "logs" / "launcher.log").write_text("a\nb\n\nc")
    out = io.BytesIO()
    show(find_log(folder, None, None, first_error=False), lines, out)
    assert out.getvalue().decode() == shown


def test_logs_that_do_not_exist_name_those_that_do(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "logs" / "rank-1.log").write_text("")
    with pytest.raises(ConfigError, match="ranks with a log there: 1"):
        find_log(folder, None, 7, first_error=False)
    with pytest.raises(ConfigError, match="attempts 1 to 1"):
        find_log(folder, 2, None, first_error=False)
    with pytest.raises(ConfigError, match="no rank recorded a failure"):
        find_log(folder, None, None, first_error=True)
    with pytest.raises(ConfigError, match="nothing of the run has started"):
        find_log(folder, None, None, first_error=False)


def test_an_attempt_puts_the_records_of_the_one_before_aside(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    put(folder, 0, status="9")
    assert attempt_of(folder) == 1
    assert begin_attempt(folder, "resume") == 2
    assert (attempt_of(folder), read_state(folder).attempt) == (2, 2)
    assert logs_of(folder, 2) == folder / "logs" / "attempt-2"
    assert (folder / "ranks.attempt-1" / "0.exit").read_text() == "9\n"
    assert not (folder / "ranks").exists()
    assert read_events(folder)[-1]["details"] == {"number": 2, "why": "resume"}
    assert begin_attempt(folder, "again") == 3
    logs_of(folder, 4).mkdir()
    with pytest.raises(ConfigError, match="another command is starting attempt 4"):
        begin_attempt(folder, "at the same time")
    os.utime(logs_of(folder, 4), (1000, 1000))
    assert begin_attempt(folder, "the other command was killed") == 4


def test_a_run_is_found_by_name_by_folder_and_as_the_newest(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "b-1"), make_run(tmp_path, "a-2")
    os.utime(old / "manifest.json", (1, 1))
    assert find_run("", tmp_path) == new
    assert find_run("b-1", tmp_path) == old
    assert find_run(str(old), Path("elsewhere")) == old
    with pytest.raises(ConfigError, match="Did you mean 'b-1'"):
        find_run("b-11", tmp_path)
    with pytest.raises(ConfigError, match=r"run\.root=DIR"):
        find_run("", tmp_path / "empty")


@pytest.mark.parametrize(
    ("files", "folders", "name", "step"),
    [
        ({"latest": "step-00000020\n"}, ["step-00000020", "step-00000030"], "step-00000020", 20),
        ({"latest": "global_step7"}, ["global_step7"], "global_step7", 7),
        ({"latest": "gone"}, ["step-00000001"], "", None),
        ({"latest_checkpointed_iteration.txt": "500\n"}, ["iter_0000500"], "iter_0000500", 500),
        ({}, ["checkpoint-500", "checkpoint-1000", "runs"], "checkpoint-1000", 1000),
        ({"other": ""}, ["anything"], "", None),
    ],
)
def test_the_newest_checkpoint_is_found_as_each_framework_writes_it(
    files: dict[str, str], folders: list[str], name: str, step: int | None, tmp_path: Path
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    found = newest_checkpoint(tmp_path)
    assert (found.path.name if found else "", found.step if found else None) == (name, step)


def test_what_may_be_typed_next_works_where_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name beside its root, by a quoted path elsewhere; --from-scratch where nothing is saved yet."""
    folder = make_run(tmp_path / "a b" / "runs", "tiny-1", status="stopped")
    monkeypatch.chdir(tmp_path / "a b")
    assert ("next", "dslaunch resume tiny-1 --from-scratch") in status_lines(read_status(folder))
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ("next", f"dslaunch resume '{folder}'") in status_lines(read_status(folder))


def test_what_a_user_stopped_has_no_failure(tmp_path: Path) -> None:
    folder = make_run(tmp_path, status="stopped")
    put(folder, 0, status="143")
    assert "first failure" not in dict(status_lines(read_status(folder)))
    write_state(folder, replace(read_state(folder), status="failed"))
    assert "first failure" in dict(status_lines(read_status(folder)))


def test_a_name_without_its_time_and_an_override_are_answered(tmp_path: Path) -> None:
    make_run(tmp_path, "vla-20260101-000000")
    with pytest.raises(ConfigError, match="Runs that begin so: vla-20260101-000000"):
        find_run("vla", tmp_path)
    with pytest.raises(ConfigError, match="A run keeps the plan that it was launched with"):
        run_and_root("resume", ("vla-20260101-000000", "cluster=8xA100"))


@pytest.mark.parametrize(
    ("kind", "details", "why"),
    [
        ("preflight_failed", {"status": 4}, "preflight, the first step of its job, found what stops a launch"),
        ("attempt_ended", {"cause": "program", "evidence": ["rank-1.log:5: ValueError: no"]},
         "the program failed; rank-1.log:5: ValueError: no; its job exits 4"),
        ("job_started", {}, "its job exits 4"),
    ],
)  # fmt: skip
def test_a_job_that_failed_says_what_its_supervisor_saw(
    kind: str, details: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last start alone; SLURM has forgotten the job."""
    folder = make_run(tmp_path, status="submitted", slurm_job="7")
    monkeypatch.setattr("dslaunch.run.now.ask", lambda _job: None)
    (folder / "job.outcome").write_text("failed 4\n")
    append_event(folder, "attempt_ended", cause="killed", evidence=["before"])
    append_event(folder, "job_started", job="7")
    append_event(folder, kind, **details)
    now = look(folder)
    assert (now.standing, why in now.why, "before" in now.why) == ("failed", True, False)


def _frame(folder: Path, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(page(read_status(folder), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_page_shows_each_of_eight_ranks(tmp_path: Path) -> None:
    folder = make_run(tmp_path, gpus=8, supervisor=myself(), host=HERE)
    for rank in range(6):
        put(folder, rank, step="40")
    put(folder, 6, step="12")
    (folder / "logs" / "launcher.log").write_text("the last line\x1b[2J\n")
    frame = _frame(folder, 80, 24)
    assert "     0 ######-." in [line.rstrip() for line in frame]
    assert any("rank 6 behind" in line for line in frame)
    assert "the last line[2J" in [line.rstrip() for line in frame]  # a log cannot clear the terminal
    assert len(frame) <= 24


def test_the_page_shows_the_one_of_1024_ranks_that_failed(tmp_path: Path) -> None:
    folder = make_run(tmp_path, nodes=128, gpus=8, supervisor=myself(), host=HERE)
    for rank in range(1024):
        put(folder, rank, step="40")
    put(folder, 700, status="1")
    frame = _frame(folder, 100, 40)
    rows = [line for line in frame if line[:7].strip().isdigit()]
    assert sum(line.count("#") for line in rows) == 1023
    (row,) = [line for line in rows if "x" in line]
    assert int(row[:7]) <= 700 < int(row[:7]) + 72
    assert len(frame) <= 40


def test_of_16384_ranks_the_page_shows_the_worst_of_several(tmp_path: Path) -> None:
    folder = make_run(tmp_path, nodes=2048, gpus=8, supervisor=myself(), host=HERE)
    put(folder, 9000, status="1")
    frame = _frame(folder, 100, 40)
    assert any("each character is the worst of 12 ranks" in line for line in frame)
    assert sum(line.count("x") for line in frame if line[:7].strip().isdigit()) == 1
    assert len(frame) <= 40
