"""What a run's own figures tell: breaches of thresholds, and the best checkpoint interval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from dslaunch.plan.interval import best_interval_s, interval
from dslaunch.planfile import prediction_from_json
from dslaunch.run import thresholds
from dslaunch.run.thresholds import Breach, Vitals
from tests.command import CommandLine


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "_LOOK_EVERY_S", 0.0)


def _add(folder: Path, name: str = "metrics.jsonl", **figures: Any) -> None:
    with (folder / name).open("a") as stream:
        stream.write(json.dumps(figures) + "\n")


def _named(breaches: list[Breach]) -> list[tuple[str, int]]:
    return [(each.threshold.name, each.step) for each in breaches]


def test_a_breach_is_told_once_and_again_after_the_figure_was_back(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    for step, norm in enumerate((1.0, 30.0, 40.0, 2.0, 0.01, 3.0, None), start=1):
        _add(tmp_path, step=step, loss=2.0, grad_norm=norm, step_time_s=1.0)
    assert _named(vitals.look()) == [("gradient_norm", 2), ("gradient_norm", 5)]
    assert vitals.look() == []


def test_a_loss_jumps_above_three_sigma_of_those_before(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    for step in range(1, 61):
        _add(tmp_path, step=step, loss=3.0 + 0.1 * math.sin(step), grad_norm=1.0)
    assert vitals.look() == []
    _add(tmp_path, step=61, loss=3.15, grad_norm=1.0)
    _add(tmp_path, step=62, loss=3.6, grad_norm=1.0)
    (breach,) = vitals.look()
    assert (breach.threshold.name, breach.step, breach.value) == ("loss_jump", 62, 3.6)
    assert "learning rate" in breach.describe()


def test_a_slow_checkpoint_is_told(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    _add(tmp_path, "checkpoints.jsonl", step=10, save_time_s=299.0)
    _add(tmp_path, "checkpoints.jsonl", step=20, save_time_s=301.0)
    assert _named(vitals.look()) == [("checkpoint_time", 20)]


def test_half_a_line_waits_for_its_end_and_a_cut_file_is_read_on(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "grad_norm": 50')
    assert vitals.look() == []
    path.write_text('{"step": 1, "grad_norm": 50.0}\n')
    assert _named(vitals.look()) == [("gradient_norm", 1)]
    path.write_text("")
    assert vitals.look() == []
    _add(tmp_path, step=1, grad_norm=1.0)
    _add(tmp_path, step=2, grad_norm=60.0)
    assert _named(vitals.look()) == [("gradient_norm", 2)]


def test_what_stood_there_before_is_history(tmp_path: Path) -> None:
    _add(tmp_path, step=1, grad_norm=50.0)
    assert Vitals(tmp_path).look() == []


def test_figures_of_the_plan_are_held_against_the_median(dslaunch: CommandLine, tmp_path: Path) -> None:
    assert dslaunch("render", "recipe=vla70b", "cluster=64xA100", "-o", str(tmp_path)).status == 0
    planned = prediction_from_json((tmp_path / "prediction.json").read_text()).step_time_s
    vitals = Vitals(tmp_path)
    for step in range(1, 21):
        _add(tmp_path, step=step, loss=2.0, grad_norm=1.0, step_time_s=3 * planned)
    slow, apart = vitals.look()
    assert (slow.threshold.name, apart.threshold.name) == ("step_time", "scaling_efficiency")
    assert (slow.step, apart.step, apart.limit) == (20, 20, 0.7)
    assert 0.15 < apart.value < 1 / 3
    for step in range(21, 50):
        _add(tmp_path, step=step, loss=2.0, grad_norm=1.0, step_time_s=planned / 2)
    assert vitals.look() == []


def test_of_a_cpu_it_is_not_known_what_the_computation_takes(dslaunch: CommandLine, tmp_path: Path) -> None:
    assert dslaunch("render", "recipe=vla_tiny", "-o", str(tmp_path)).status == 0
    vitals = Vitals(tmp_path)
    for step in range(1, 25):
        _add(tmp_path, step=step, loss=2.0, grad_norm=1.0, step_time_s=50.0)
    assert _named(vitals.look()) == [("step_time", 20)]


def test_every_threshold_has_a_source_and_causes() -> None:
    for each in thresholds.thresholds():
        assert each.source
        assert each.causes
        assert any(value is not None for value in (each.below, each.above, each.of_plan, each.sigma))


def test_the_best_interval_loses_least() -> None:
    """Against the exact expected time of Daly's model: segments of work and save, done again until none fails."""
    save_s, mtbf_s = 30.0, 4 * 3600.0

    def expected(work_s: float) -> float:
        """Expected time for each second of work; restart time 0 (Daly 2006, equation 20)."""
        return mtbf_s * math.expm1((work_s + save_s) / mtbf_s) / work_s

    best = best_interval_s(save_s, mtbf_s)
    assert best == pytest.approx(math.sqrt(2 * save_s * mtbf_s), rel=0.05), "Young's is the first order"
    searched = min(range(10, 5000), key=expected)
    assert best == pytest.approx(searched, rel=0.01)
    assert best_interval_s(3 * mtbf_s, mtbf_s) == mtbf_s


def test_more_nodes_save_more_often() -> None:
    small, large = (interval(30.0, 6334.0, nodes, step_s=10.0) for nodes in (8, 2048))
    assert large.job_mtbf_hours == pytest.approx(54 * 24 / 419, rel=1e-3), "Llama 3: one interruption in 3.1 hours"
    assert large.steps < small.steps
    assert interval(30.0, 6334.0, 2048, step_s=1e6).steps == 1


def test_the_plan_says_how_often_and_takes_it_over(dslaunch: CommandLine) -> None:
    words = "recipe=llama3_8b cluster=64xH100 checkpoint.save_seconds=20"
    plan = dslaunch(f"plan {words} checkpoint.every=auto --json").json
    best = plan["checkpoint"]["steps"]
    assert plan["files"]["checkpoint_every"] == best
    assert plan["supervision"]["restart_max"] == 3
    assert f"checkpoint.every={best} (" in dslaunch(f"plan {words} checkpoint.every=auto").out
    pinned = dslaunch(f"plan {words} checkpoint.every=7 --json").json
    assert pinned["files"]["checkpoint_every"] == 7
    assert pinned["checkpoint"]["steps"] == best


def test_auto_without_a_measurement_is_refused(dslaunch: CommandLine) -> None:
    done = dslaunch("plan recipe=llama3_8b cluster=64xH100 checkpoint.every=auto")
    assert done.status == ConfigError.status
    assert "save_seconds is missing" in done.err
    assert "from 0 on, and auto" in dslaunch("plan recipe=llama3_8b cluster=8xH100 checkpoint.every=often").err
