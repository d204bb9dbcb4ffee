"""What a run's own figures tell: breaches of thresholds, and the best checkpoint interval."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from dslaunch.errors import ConfigError
from dslaunch.plan.interval import best_interval_s, interval
from dslaunch.planfile import SupervisionPlan, prediction_from_json
from dslaunch.render import gpus
from dslaunch.render.profiled import communication_share
from dslaunch.review.measured import measured
from dslaunch.rules.symptoms import matching
from dslaunch.run import thresholds
from dslaunch.run.notify import Notifier
from dslaunch.run.state import State, write_state
from dslaunch.run.thresholds import Breach, Vitals
from dslaunch.run.tracking import Tracker
from dslaunch.schema.supervision import Watched
from tests.command import CommandLine
from tests.launching import make_plan
from tests.unit.test_preflight_reading import NVLINK_A100


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


def test_what_is_told_of_a_breach_is_a_symptom_that_explain_knows() -> None:
    found = {each.name: matching(Breach(each, 7, 3.0, 2.0).describe())[0].id for each in thresholds.thresholds()}
    slow = ("checkpoint_time", "communication_share", "nvlink_load", "scaling_efficiency", "step_time")
    gpus = ("gpu_activity", "gpu_slowed", "gpu_steadiness", "gpu_utilization", "straggler")
    expected = {"gradient_norm": "loss-spike", "loss_jump": "loss-spike"}
    assert found == expected | dict.fromkeys(slow, "slow") | dict.fromkeys(gpus, "uneven-utilisation")


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


@pytest.mark.parametrize(
    "line", ["[]", "7", '"x"', "{}", "null", "{", "\xff", '{"grad_norm": "many", "step": 3}', '{"step": "third"}',
             '{"step": Infinity, "loss": {}}', '{"step": null, "step_time_s": true}', '{"step": 3, "loss": []}'],
)  # fmt: skip
def test_what_a_program_writes_beside_the_figures_ends_nothing(line: str, tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    assert vitals.look() == []
    _add(tmp_path, step=4, grad_norm=50.0)
    assert _named(vitals.look()) == [("gradient_norm", 4)]
    (tmp_path / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    write_state(tmp_path, State("a-1", "local", "running"))
    lost: list[str] = []
    wanted = SupervisionPlan(prometheus_dir=str(tmp_path))
    Notifier(tmp_path, wanted, lost.append, Tracker(tmp_path, make_plan(), lost.append)).write()
    assert 'dslaunch_up{run=' in next(tmp_path.glob("*.prom")).read_text()
    assert lost == []
    found = measured(tmp_path)
    assert found is not None
    assert found.steps == ()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_loss_that_is_no_number_is_a_jump_at_once(value: str, tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": {value}}}\n' for step in (1, 2)))
    (breach,) = vitals.look()
    assert (breach.threshold.name, breach.step) == ("loss_jump", 1)
    assert f"loss {float(value):.4g} is no finite number (loss_jump)" in breach.describe()
    json.loads(json.dumps(breach.figures(), allow_nan=False))
    for step in range(3, 60):
        _add(tmp_path, step=step, loss=2.0)
    assert vitals.look() == []


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
    assert {each.name for each in thresholds.thresholds()} == set(get_args(Watched))


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


def _gpus(folder: Path, rank: int, **said: Any) -> None:
    """What gpus.py has written, as often as it is called."""
    (folder / "ranks").mkdir(exist_ok=True)
    path = folder / "ranks" / f"{rank}.gpus"
    path.write_text(json.dumps({"host": f"n{rank}", "at": 0.0, "slowed": [], **said}))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + _gpus_written.setdefault(path, 0)))
    _gpus_written[path] += 1_000_000_000


_gpus_written: dict[Path, int] = {}


def test_an_idle_gpu_of_one_host_is_told_by_its_counter(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    _add(tmp_path, step=7, loss=1.0)
    found: list[Breach] = []
    for _ in range(20):
        _gpus(tmp_path, 0, counter="sm_active", busy=[0.95, 0.6], nvlink_share=[0.1, 0.8])
        _gpus(tmp_path, 8, counter="gpu_utilization", busy=[0.99], nvlink_share=[None], slowed=[0])
        found += vitals.look()
    assert [(each.threshold.name, each.where, each.step) for each in found] == [
        ("gpu_slowed", "n8", 7), ("gpu_activity", "n0", 7), ("nvlink_load", "n0", 7),
    ]  # fmt: skip
    assert "step 7, n0: sm_active 0.6 is below 0.85 (gpu_activity)" in found[1].describe()
    assert "n8: slowed_gpus 1 is above 0 (gpu_slowed): heat or a power supply of that host" in found[0].describe()


def test_a_gpu_whose_load_swings_is_not_steady(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    found: list[Breach] = []
    for number in range(20):
        _gpus(tmp_path, 0, counter="sm_active", busy=[1.0 if number % 2 else 0.7], nvlink_share=[None])
        found += vitals.look()
    assert [(each.threshold.name, round(each.value, 3)) for each in found] == [("gpu_steadiness", 0.15)]


def test_what_cannot_be_seen_of_the_gpus_is_said_once(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    _gpus(tmp_path, 0, unseen="neither dcgmi nor nvidia-smi says what the GPUs do")
    assert vitals.look() == []
    assert vitals.look() == []
    assert vitals.unseen == ["GPUs of n0: neither dcgmi nor nvidia-smi says what the GPUs do"]


def test_a_recorded_share_of_communication_is_judged(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    (tmp_path / "profiles").mkdir()
    for rank, share in ((0, 0.19), (3, 0.4)):
        row = {"communication_share": share, "where": f"rank {rank}"}
        (tmp_path / "profiles" / f"rank-{rank}.share.json").write_text(json.dumps(row))
    found = {(each.threshold.name, each.where, round(each.value, 2)) for each in vitals.look()}
    assert found == {("communication_share", "rank 3", 0.4), ("straggler", "rank 0", 0.21)}


def test_communication_that_work_hides_does_not_count() -> None:
    """Microseconds; a GPU's own kernels decide, and the CPU's waiting says nothing."""
    kernels = [
        ("sm90_gemm", 0.0, 60.0, True), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40.0, 100.0, True),
        ("cudaStreamSynchronize", 0.0, 100.0, False), ("aten::mm", 60.0, 100.0, False),
    ]  # fmt: skip
    assert communication_share(kernels) == pytest.approx(0.4)
    talk, work = ("gloo:all_reduce", 50.0, 75.0, False), ("aten::add", 75.0, 100.0, False)
    assert communication_share([("aten::mm", 0.0, 50.0, False), talk, work]) == pytest.approx(0.25)
    assert communication_share([("aten::mm", 0.0, 50.0, False)]) is None


# Not recorded on a machine: the form of NVIDIA/DCGM:dcgmi/DeviceMonitor.cpp, PrintMetricsRow, v3.3.
_DMON = """\
#Entity   SMACT         NVLTX                NVLRX
ID
GPU 0     0.000         N/A                  N/A
GPU 1     0.312         1203                 1204
GPU 0     0.994         91203456789          90203456789
GPU 1     0.871         N/A                  N/A
"""


def test_counters_are_read_as_the_tools_print_them() -> None:
    assert gpus.by_dcgm(_DMON) == {0: (0.994, 91203456789.0), 1: (0.871, None)}
    assert gpus.by_dcgm("Error: unable to establish a connection to the specified host: localhost\n") == {}
    assert gpus.by_nvidia_smi("0, 97\n1, 5\n2, [N/A]\nNo devices were found\n") == {0: 0.97, 1: 0.05}
    assert gpus.slowed("0, 0x0000000000000001\n1, 0x0000000000000048\n2, [N/A]\n") == [1]
    assert gpus.link_speeds(NVLINK_A100) == {0: 75e9, 1: 50e9}


def test_the_sampler_tells_what_it_sees_and_ends_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools are stand-ins that print the above; where there are none, that is what is told."""
    for name, text in (("dcgmi", _DMON), ("nvidia-smi", NVLINK_A100)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "0.gpus"
    started = f"print(subprocess.Popen([sys.executable, {gpus.__file__!r}, {str(out)!r}]).pid)"
    waits = f"while not os.path.exists({str(out)!r}): time.sleep(0.05)"
    code = f"import os, subprocess, sys, time; {started}\n{waits}"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60, capture_output=True)
    limit = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < limit, "it outlives the process that started it"
        time.sleep(0.1)
    said = json.loads(out.read_text())
    assert (said["counter"], said["busy"]) == ("sm_active", [0.994, 0.871])
    assert said["nvlink_share"] == [pytest.approx(1.216, abs=1e-3), None]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "unseen" in gpus.sample({})
