"""`dslaunch calibrate`: what a site's runs measured corrects what its later plans predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.planfile import plan_from_json, prediction_from_json, to_json
from dslaunch.run.state import State, write_state
from tests.command import CommandLine, valid

LLAMA = ("recipe=llama3_8b", "cluster=8xA100", "script=train.py")
OTHER = (*LLAMA, "training.micro_batch=2")
KEY = "A100-SXM4-80GB/transformers"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def made_run(
    dslaunch: CommandLine, name: str, words: tuple[str, ...], *, time: float = 1.0, memory: float = 1.0,
    steps: int = 40, status: Any = "finished", kind: str = "cuda_peak_allocated", site: Path | None = None,
) -> Path:  # fmt: skip
    """A run's folder as a launch leaves it, whose steps took `time` times what was predicted."""
    folder = Path("runs") / name
    where = ("--config-dir", str(site)) if site else ()
    ran = dslaunch("render", *words, *where, "-o", str(folder))
    assert ran.status == 0, ran.err
    said = prediction_from_json((folder / "prediction.json").read_text())
    write_state(folder, State(name, "local", status, exit_status=int(status == "failed")))
    rows = [
        {
            "step": n, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-4, "samples_per_s": 1.0, "tokens_per_s": 1.0,
            "memory_kind": kind, "memory_gib": said.allocated_gib * memory * (0.9 if n < 3 else 1.0),
            "step_time_s": said.step_time_s * time * (9 if n <= 5 else 4 if n % 10 == 0 else 1),
        }
        for n in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def planned(dslaunch: CommandLine, *words: str) -> Any:
    ran = dslaunch("plan", *words, "--json")
    assert ran.out, ran.err
    return ran.json


def test_one_run_moves_later_plans_most_of_the_way_and_runs_of_more_plans_further(
    site: Path, dslaunch: CommandLine
) -> None:
    """Warm-up and single slow steps do not count; a second run of the same plan adds nothing."""
    shipped = planned(dslaunch, *LLAMA)
    first = made_run(dslaunch, "first", LLAMA, time=1.3, memory=1.05)
    ran = dslaunch("calibrate", str(first), "--config-dir", str(site))
    assert ran.status == 0, ran.err
    assert f"{KEY}: time x1 -> x1.2" in ran.out
    assert "first: step" in ran.out
    assert ": x1.3;" in ran.out
    once = planned(dslaunch, *LLAMA, "--config-dir", str(site))
    ratio = once["step_time_s"] / shipped["step_time_s"]
    assert 1.2 < ratio < 1.3
    assert 1.0 < once["allocated_gib"] / shipped["allocated_gib"] <= 1.05
    assert once["tables_sha256"] != shipped["tables_sha256"]

    again = made_run(dslaunch, "again", LLAMA, time=1.3, memory=1.05)
    assert dslaunch("calibrate", str(again), "--config-dir", str(site)).status == 0
    twice = planned(dslaunch, *LLAMA, "--config-dir", str(site))
    assert twice["step_time_s"] == pytest.approx(once["step_time_s"])

    more = [
        made_run(dslaunch, f"m{n}", (*LLAMA, f"training.global_batch={64 * n}"), time=1.3)
        for n in (3, 4, 5, 6)
    ]
    assert dslaunch("calibrate", *map(str, more), "--config-dir", str(site)).status == 0
    often = planned(dslaunch, *LLAMA, "--config-dir", str(site))
    assert often["step_time_s"] / shipped["step_time_s"] == pytest.approx(1.3, rel=0.01)
    calibration = often["calibration"]
    assert (calibration["key"], calibration["runs"], calibration["plans"]) == (KEY, 6, 5)


def test_a_plan_of_an_earlier_run_shows_what_that_measured(site: Path, dslaunch: CommandLine) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=1.3)
    assert dslaunch("calibrate", str(run), "-o", str(site / "efficiency.yaml")).status == 0
    shown = dslaunch("plan", *LLAMA, "--config-dir", str(site)).out
    assert f"by efficiency.yaml for {KEY}: time x1.2" in shown
    assert "\nmeasured in first  step " in shown
    assert "what 1 run of yours leaves open" in shown
    other = dslaunch("plan", *OTHER, "--config-dir", str(site)).out
    assert "by efficiency.yaml" in other
    assert "measured in" not in other
    assert "by efficiency.yaml" not in dslaunch("plan", *LLAMA).out
    elsewhere = dslaunch("plan", "recipe=llama3_8b", "cluster=8xH100", "--config-dir", str(site)).out
    assert "by efficiency.yaml" not in elsewhere


def test_a_run_that_was_predicted_with_a_correction_teaches_of_the_shipped_rates(
    site: Path, dslaunch: CommandLine
) -> None:
    first = made_run(dslaunch, "first", LLAMA, time=1.3)
    dslaunch("calibrate", str(first), "--config-dir", str(site))
    corrected = planned(dslaunch, *OTHER, "--config-dir", str(site))["step_time_s"]
    shipped = planned(dslaunch, *OTHER)["step_time_s"]
    second = made_run(dslaunch, "second", OTHER, time=1.3 * shipped / corrected, site=site)
    ran = dslaunch("calibrate", str(second), "--config-dir", str(site))
    (said,) = (line for line in ran.out.splitlines() if line.startswith("  second:"))
    assert ": x1.3;" in said


def test_a_search_under_a_correction_agrees_with_its_ledger(site: Path, dslaunch: CommandLine) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=0.7, memory=1.2)
    dslaunch("calibrate", str(run), "--config-dir", str(site))
    found = planned(dslaunch, *LLAMA, "strategy=auto", "engine=deepspeed", "--config-dir", str(site))
    assert found["candidates"][0]["step_time_s"] == pytest.approx(found["step_time_s"])
    assert found["candidates"][0]["peak_memory_gib"] == pytest.approx(found["peak_memory_gib"])
    assert found["calibration"]["memory"] > 1.1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "failed"}, "failed, so its steps"),
        ({"steps": 12}, "has 7 timed steps after the first 5; 15 or more"),
        ({"steps": 0, "status": "submitted"}, "is submitted, and its metrics.jsonl has 0 timed steps"),
    ],
)
def test_a_run_that_cannot_teach_is_refused_with_the_reason(
    site: Path, dslaunch: CommandLine, changes: dict[str, Any], reason: str
) -> None:
    run = made_run(dslaunch, "bad", LLAMA, **changes)
    ran = dslaunch("calibrate", str(run), "--config-dir", str(site))
    assert ran.status == 2
    assert f"{run}: teaches nothing: {reason}" in ran.err or f"{run}: teaches nothing: is" in ran.err
    assert reason in ran.err
    assert list(site.iterdir()) == []
    good = made_run(dslaunch, "good", LLAMA)
    both = dslaunch("calibrate", str(run), str(good), "--config-dir", str(site))
    assert both.status == 0
    assert reason in both.err
    assert "bad" not in (site / "efficiency.yaml").read_text()


def test_a_run_on_the_cpu_and_one_of_another_version_teach_nothing(site: Path, dslaunch: CommandLine) -> None:
    cpu = made_run(dslaunch, "cpu", ("recipe=vla_tiny", "cluster=local"), kind="host_peak_rss")
    assert "ran on CPUs" in dslaunch("calibrate", str(cpu), "--config-dir", str(site)).err
    old = made_run(dslaunch, "old", LLAMA)
    figures = json.loads((old / "prediction.json").read_text()) | {"tables_sha256": "0" * 64}
    (old / "prediction.json").write_text(json.dumps(figures))
    assert "another version's rates" in dslaunch("calibrate", str(old), "--config-dir", str(site)).err
    mixed = made_run(dslaunch, "mixed", LLAMA)
    plan = plan_from_json((Path("runs") / "old" / "plan.json").read_text())
    (mixed / "plan.json").write_text(to_json(plan).replace('"bf16"', '"fp16"'))
    assert "of another plan.json" in dslaunch("calibrate", str(mixed), "--config-dir", str(site)).err
    assert list(site.iterdir()) == []


def test_host_memory_teaches_time_alone(site: Path, dslaunch: CommandLine) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=1.3, memory=2.0, kind="host_peak_rss")
    ran = dslaunch("calibrate", str(run), "--config-dir", str(site))
    assert "allocated memory not measured" in ran.out
    assert "memory x1 -> x1\n" in ran.out


def test_without_a_place_nothing_is_written(site: Path, dslaunch: CommandLine) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=1.3)
    before = sorted(Path().rglob("*"))
    ran = dslaunch("calibrate", str(run))
    assert ran.status == 0
    assert "nothing is written: name the site's folder" in ran.out
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "calibrate takes run folders"),
        ("runs/none", "holds no state.json"),
        ("RUN --config-dir gone", "there is no folder gone"),
        ("RUN -o site/rates.yaml", "Name it site/efficiency.yaml"),
        ("RUN -o site/efficiency.yaml --config-dir site", "Give one"),
    ],
)
def test_a_wrong_command_is_answered(site: Path, dslaunch: CommandLine, words: str, said: str) -> None:
    run = made_run(dslaunch, "first", LLAMA)
    ran = dslaunch("calibrate", *words.replace("RUN", str(run)).split())
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema: dslaunch.efficiency/9\n", "schema is 'dslaunch.efficiency/9'"),
        ("[]\n", "not as `dslaunch calibrate` writes it"),
        ("a: [\n", "not YAML"),
    ],
)
def test_a_broken_file_stops_a_plan(site: Path, dslaunch: CommandLine, text: str, said: str) -> None:
    (site / "efficiency.yaml").write_text(text)
    ran = dslaunch("plan", *LLAMA, "--config-dir", str(site))
    assert ran.status == 2
    assert said in ran.err
    assert "efficiency.yaml" in ran.err


def test_corrections_of_another_version_stop_a_plan_and_are_dropped_by_calibrate(
    site: Path, dslaunch: CommandLine
) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=1.3)
    dslaunch("calibrate", str(run), "--config-dir", str(site))
    file = site / "efficiency.yaml"
    lines = file.read_text().splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("rates_sha256"))
    lines[at] = "rates_sha256: " + "0" * 64
    file.write_text("\n".join(lines).replace(KEY, "H100-SXM5-80GB/torch") + "\n")
    ran = dslaunch("plan", *LLAMA, "--config-dir", str(site))
    assert ran.status == 2
    assert "Take the file away" in ran.err
    again = dslaunch("calibrate", str(run), "--config-dir", str(site))
    assert "what it holds is dropped" in again.err
    assert "H100" not in file.read_text()


def test_a_factor_that_no_run_taught_is_refused(site: Path, dslaunch: CommandLine) -> None:
    run = made_run(dslaunch, "first", LLAMA, time=1.3)
    dslaunch("calibrate", str(run), "--config-dir", str(site))
    file = site / "efficiency.yaml"
    (time,) = (line for line in file.read_text().splitlines() if line.startswith("    time:"))
    for wrong in ("0", "fast", "true", ".nan"):
        file.write_text(file.read_text().replace(time, f"    time: {wrong}"))
        time = f"    time: {wrong}"
        ran = dslaunch("plan", *LLAMA, "--config-dir", str(site))
        assert ran.status == 2
        assert "where a factor from 0.1 to 10 belongs" in ran.err


def test_json_says_what_was_learned_and_what_teaches_nothing(site: Path, dslaunch: CommandLine) -> None:
    folders = [made_run(dslaunch, "good", LLAMA, time=1.3), made_run(dslaunch, "bad", LLAMA, status="failed")]
    ran = dslaunch("calibrate", *map(str, folders), "--config-dir", str(site), "--json")
    valid(ran.json, "dslaunch.calibrated/1", dslaunch)
    (found,) = ran.json["corrections"]
    assert (found["key"], found["before"]["time"]) == (KEY, 1.0)
    assert found["after"]["time"] > 1.2
    assert [(each["run"], "failed" in each["why"]) for each in ran.json["refused"]] == [("runs/bad", True)]
    assert Path(ran.json["file"]).is_file()
