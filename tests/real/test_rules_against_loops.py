"""Rules about loops of torch's own: each case's script is run, and shows by itself what came of it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.real.parts import need

need("torch")

from dslaunch.rules import check  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402


def cases(*rules: str) -> list[Case]:
    return [case for case in all_cases() if case.rule in rules and case.real != "unjudged"]


def severities(case: Case) -> list[str]:
    """Of the findings of the case's own rule."""
    return [each.severity for each in check(None, case.fileset(), case.settings) if each.rule == case.rule]


def run(case: Case, folder: Path) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(case.files["train.py"])
    return runpy.run_path(str(script))


@pytest.mark.parametrize("case", cases("script.half-weights", "script.schedule-steps"), ids=lambda case: case.name)
def test_an_error_is_raised(case: Case, tmp_path: Path) -> None:
    if "error" not in severities(case):
        run(case, tmp_path)
        return
    with pytest.raises(ValueError, match=r"unscale FP16 gradients|Tried to step") as raised:
        run(case, tmp_path)
    assert leads_to(repr(raised.value), [case.rule])


@pytest.mark.parametrize("case", cases("script.fresh-iterator"), ids=lambda case: case.name)
def test_the_first_samples_alone_are_seen(case: Case, tmp_path: Path) -> None:
    assert (len(run(case, tmp_path)["seen"]) == 2) == bool(severities(case))


@pytest.mark.parametrize("case", cases("script.zero-grad-first"), ids=lambda case: case.name)
def test_no_weight_moves(case: Case, tmp_path: Path) -> None:
    assert run(case, tmp_path)["moved"] != bool(severities(case))
