"""Sweeps: which words have several values, and what is said of the runs before and after the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.compose import swept
from dslaunch.errors import ConfigError
from tests.command import CommandLine


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("training.optimizer.lr=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("training.optimizer.lr=choice(1e-4, 3e-4)", ["1e-4", "3e-4"]),
        ("training.seed=range(1,10,3)", ["1", "4", "7"]),
        ("training.seed=sort(3,1,2)", ["1", "2", "3"]),
        ("launcher.pass_env=[A,B],[C]", ["[A,B]", "[C]"]),
        ("launcher.pass_env=[A,B]", ["[A,B]"]),
        ("cluster=64xA100,8x8xA100-40GB", ["64xA100", "8x8xA100-40GB"]),
        ("env.NCCL_IB_HCA=mlx5_0,mlx5_1", ["mlx5_0,mlx5_1"]),
        ("script=choice(a.py, 'b, c.py')", ["a.py", "b, c.py"]),
    ],
)
def test_values_are_those_that_hydra_reads(word: str, values: list[str]) -> None:
    assert swept(word) == [f"{word.split('=')[0]}={value}" for value in values]


@pytest.mark.parametrize("value", ["interval(0,1)", "glob(*)", "shuffle(1,2)"])
def test_a_sweep_without_a_list_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="in a fixed order"):
        swept(f"training.seed={value}")


def test_the_table_tells_figures_and_refusals(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["recipe=vla_tiny", "cluster=2x4xA100", "module=", "script=train.py", "launcher=slurm", "--multirun"]
    words += ["training.micro_batch=4,7", "cluster.price_per_gpu_hour=2", "training.seed=1,2"]
    ran = dslaunch(*words, "--dry-run")
    assert ran.status == 3
    heading, *rows = ran.out.splitlines()
    assert heading.split()[:4] == ["run", "training.micro_batch", "training.seed", "layout"]
    assert [" ".join(row.split()[:3]) for row in rows] == ["1 4 1", "2 4 2", "3 7 1", "4 7 2"]
    assert ["TP1 PP1 DP8" in row and "tokens/s" in row and "$" in row for row in rows] == [True] * 2 + [False] * 2
    assert "global_batch 32 / (micro_batch 7 x dp 8" in rows[3]
    assert "run 3 and 1 more of 4 refused" in ran.err

    ran = dslaunch(*words, "--dry-run", "--skip-refused", "launcher.slurm.at_once=1")
    assert ran.status == 0, ran.err
    assert "sbatch --parsable --array=1-2%1" in ran.out
    assert ran.out.count("  task ") == 2
    assert not (tmp_path / "runs").exists()


def test_plans_of_other_shapes_get_arrays_of_their_own(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["recipe=vla_tiny", "module=", "script=train.py", "launcher=slurm", "--multirun", "--dry-run"]
    words += ["training.seed=1,2", "cluster=2x4xA100,1x8xA100", "training.micro_batch=4"]
    ran = dslaunch(*words)
    assert ran.status == 0, ran.err
    assert [word for word in ran.out.split() if word.startswith("--array=")] == ["--array=1,3", "--array=2,4"]


def test_skip_refused_belongs_to_a_sweep(dslaunch: CommandLine) -> None:
    assert dslaunch("recipe=vla_tiny", "cluster=local", "--skip-refused").status == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipe=vla_tiny", "training.seed=range(0,40)", "training.steps=range(1,40)"], "1,560 combinations"),
        (["recipe=vla_tiny,vla70b", "training.seed=1,2"], "recipe=vla_tiny,vla70b: a sweep has one recipe"),
    ],
)
def test_what_no_sweep_can_be_is_said_before_a_plan_is_made(
    words: list[str], said: str, dslaunch: CommandLine
) -> None:
    ran = dslaunch(*words, "cluster=local", "--multirun", "--dry-run")
    assert (ran.status, said in ran.err) == (2, True), ran.err
