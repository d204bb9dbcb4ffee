"""What no engine executes is refused in few words: what was asked for, who has it, what is against that one."""

from __future__ import annotations

import pytest

from tests.command import CommandLine, refused

VLA = "plan recipe=vla70b cluster=64xA100"


def test_of_a_setting_of_one_engine_only_that_one_is_told(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{VLA} strategy=hetero training.macro_batches=3")
    _, asked, native = err.strip().splitlines()
    assert asked == "  training.macro_batches is 3, which engine native has"
    assert native.startswith("  native: training.macro_batches is 3; it does not divide the 16 micro-batches of ")
    assert native.endswith("training.macro_batches can be 2")
    assert "engine native" in dslaunch(f"{VLA} strategy=hetero training.macro_batches=2").out


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "plan recipe=llama3_8b cluster=8xA100 strategy=zenflow strategy.every.pp=2",
            ["  strategy.zenflow is DeepSpeed's", "  deepspeed: strategy.llm.pp is 2; deepspeed takes pp 1; "],
        ),
        (
            "plan recipe=llama3_70b training.macro_batches=2 strategy.dispatcher=deepep",
            [
                "  strategy.dispatcher is deepep, which is Megatron's",
                "  training.macro_batches is 2, which engine native has",
                "  no engine has these together: leave one out",
            ],
        ),
        (
            "plan recipe=llama3_70b strategy.shard=2",
            ["  strategy.shard is 2, and strategy.sharding zero: hsdp alone reads it", "  leave it out"],
        ),
    ],
)
def test_settings_that_no_engine_has_together_are_named_alone(
    dslaunch: CommandLine, words: str, lines: list[str]
) -> None:
    said = refused(dslaunch, words).strip().splitlines()[1:]
    assert len(said) == len(lines)
    assert all(one.startswith(line) for one, line in zip(said, lines, strict=True)), said


def test_a_number_of_parts_that_no_step_has_is_refused_with_those_it_can_have(dslaunch: CommandLine) -> None:
    err = refused(dslaunch, f"{VLA} strategy=auto training.macro_batches=3")
    assert "no such part of 512 divides by 3. It can be 2, 4, 8" in err


@pytest.mark.parametrize("launcher", ["local", "torchrun", "openmpi", "kubernetes"])
def test_a_container_that_the_launcher_would_not_start_is_refused(dslaunch: CommandLine, launcher: str) -> None:
    words = "recipe=llama3_8b launcher.container.kind=pyxis launcher.container.image=image:1 script=train.py"
    err = refused(dslaunch, f"plan {words} launcher={launcher}")
    assert f"launcher is {launcher}, which starts the ranks outside of it; use launcher=slurm, or leave" in err
    assert ("launcher.kubernetes.image" in err) == (launcher == "kubernetes")
    for other in ("slurm", "auto"):
        assert dslaunch(f"plan {words} launcher={other}").status == 0
