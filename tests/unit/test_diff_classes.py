"""Each key of plan.json has a class of change, and each class names a key that there is."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import pytest

from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.review.classes import _KEYS, kind_of_file, kind_of_key


def _keys(kind: type, prefix: str = "") -> Iterator[str]:
    for name, annotation in typing.get_type_hints(kind).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield from _keys(annotation, f"{key}.")
        elif annotation == dict[str, ComponentPlan]:
            yield from _keys(ComponentPlan, f"{key}.llm.")
        else:
            yield key


def test_every_key_of_a_plan_has_a_class() -> None:
    keys = list(_keys(Plan))
    assert "training.lr" in keys
    assert "components.llm.tp" in keys
    for key in keys:
        kind_of_key(key)


def test_every_row_of_the_table_is_a_key_of_a_plan() -> None:
    keys = [key.replace(".llm.", ".*.") for key in _keys(Plan)]
    open_ended = ("model.", "engine.modes.")
    for row in _KEYS:
        assert row.startswith(open_ended) or any(key == row or key.startswith(f"{row}.") for key in keys), row


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("training.seed", "convergence"),
        ("training.overlap_comm", "performance"),
        ("components.llm.zero", "performance"),
        ("model.components.llm.layers", "convergence"),
        ("engine.modes.zero_plus_plus.hpz", "convergence"),
        ("engine.modes.nvme.path", "performance"),
        ("engine.modes.ddp.bucket_cap_mb", "performance"),
        ("engine.modes.ddp.comm_hook", "convergence"),
        ("engine.modes.ddp.sync_batchnorm", "convergence"),
        ("engine.extra.zero_optimization.x", "convergence"),
        ("files.checkpoint_every", "reliability"),
        ("cluster.gpu", "resources"),
    ],
)
def test_the_class_of_a_key(key: str, kind: str) -> None:
    assert kind_of_key(key) == kind


def test_a_key_that_nobody_classed_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="has no class"):
        kind_of_key("components.llm.colour")


def test_a_comment_in_a_script_is_cosmetic_and_an_option_of_sbatch_is_not() -> None:
    before = "#!/bin/bash\n#SBATCH --nodes=1\n# one\n"
    assert kind_of_file("job.sbatch", before, before.replace("# one", "# two"), []) == "cosmetic"
    assert kind_of_file("job.sbatch", before, before.replace("=1", "=2"), []) == "resources"


@pytest.mark.parametrize(
    ("name", "kind"), [("preflight.json", "reliability"), ("gpus.py", "reliability"), ("profiled.py", "cosmetic")]
)
def test_what_stands_beside_the_training_is_no_convergence(name: str, kind: str) -> None:
    assert kind_of_file(name, "", "print(1)\n", []) == kind
    assert kind_of_file(name, "print(1)\n", "print(2)\n", ["convergence"]) == kind


def test_another_framework_file_beside_the_same_plan_is_for_a_person_to_judge() -> None:
    assert kind_of_file("ds_config.json", "{}", '{"a": 1}', []) == "convergence"
