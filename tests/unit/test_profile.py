"""profile=: what is refused, and which steps are recorded."""

from __future__ import annotations

import pytest

from dslaunch.render.profiled import Steps
from tests.command import CommandLine


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cluster=local profile=nsys", "records CUDA, and the cluster's GPU is CPU. Use profile=torch"),
        (
            "cluster=local profile=torch profile.ranks=[0,2]",
            "profile.ranks names 2; the plan's ranks are 0 to 1",
        ),
        ("cluster=local profile=ncu", "profile=ncu: no such profile. There are none, nsys, torch."),
        ("cluster=local profile=torch profile.ranks=[]", "profile.ranks"),
        ("cluster=local profile=torch profile.steps=0", "profile.steps"),
    ],
)
def test_a_mistake_is_refused_with_what_is_allowed(dslaunch: CommandLine, words: str, said: str) -> None:
    ran = dslaunch(f"plan recipe=vla_tiny {words}")
    assert ran.status == 2
    assert said in ran.err


@pytest.mark.parametrize(
    ("first", "count", "done", "expected"),
    [
        (1, 1, 5, ["begin before 1", "end after 1"]),
        (3, 2, 5, ["begin before 3", "end after 4"]),
        (4, 9, 5, ["begin before 4", "end after 5"]),  # the program ended earlier: what there is is written
        (9, 1, 5, []),
    ],
)
def test_the_steps_that_are_recorded(first: int, count: int, done: int, expected: list[str]) -> None:
    now, said = 0, []
    steps = Steps(
        first, count, lambda: said.append(f"begin before {now + 1}"), lambda: said.append(f"end after {now}")
    )
    for now in range(1, done + 1):  # noqa: B007
        steps.stepped(1)
        steps.stepped(2)
    steps.finish()
    assert said == expected
