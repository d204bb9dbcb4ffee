"""Leaf switches: how their hosts are named, and what follows for the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.hosts import expanded, leaf_of
from dslaunch.launch.hosts import fitting
from tests.command import CommandLine
from tests.launching import make_plan

SWITCHES = {"odd": ("n[1,3]",), "even": ("n2", "n4")}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07-08]", ["n1", "n2", "n3", "n07", "n08"]),
        ("r[1-2]-n[1-2].x", ["r1-n1.x", "r1-n2.x", "r2-n1.x", "r2-n2.x"]),
    ],
)
def test_patterns_are_read_as_slurm_reads_them(pattern: str, names: list[str]) -> None:
    assert list(expanded(pattern)) == names


@pytest.mark.parametrize("pattern", ["n[1", "n[2-1]", "n[a]", "n[1-]"])
def test_a_bracket_that_cannot_be_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="Write such as n"):
        list(expanded(pattern))


def test_hosts_of_a_leaf_follow_one_another() -> None:
    assert leaf_of(SWITCHES) == {"n1": 0, "n3": 0, "n2": 1, "n4": 1}
    plan = make_plan(4, 2, local=False)
    plan = replace(plan, cluster=replace(plan.cluster, switches=SWITCHES))
    text = "".join(f"{host} slots=2\n" for host in ("x", "n2", "root@n1", "n3"))
    assert list(fitting(plan, text, "hosts")) == ["root@n1", "n3", "n2", "x"]


def test_a_segment_has_to_fit_the_job_and_the_domain(dslaunch: CommandLine, tmp_path: Path) -> None:
    words = ["render", "recipe=vla70b", "cluster=64xGB200", "-o", str(tmp_path / "out")]
    refused = dslaunch(*words, "launcher.slurm.segment=5")
    assert refused.status == 2
    assert "16 nodes are no multiple of it. Allowed here: 2, 4, 8, 16" in refused.err
    refused = dslaunch(*words, "launcher.slurm.segment=1")
    assert "of llm takes 2 nodes" in refused.err
    assert dslaunch(*words, "launcher.slurm.segment=4", "launcher.slurm.switches=1@10").status == 0
    lines = (tmp_path / "out" / "job.sbatch").read_text().splitlines()
    assert {"#SBATCH --segment=4", "#SBATCH --switches=1@10"} <= set(lines)
    page = dslaunch("plan", *words[1:3], "launcher.slurm.segment=4", "launcher.slurm.reservation=r1").out
    assert "SLURM --segment=4: every 16 ranks stand in one block, such as an NVLink domain of 72 GPUs" in page
    assert "SLURM --reservation=r1: its nodes alone" in page


def test_a_host_has_one_leaf(dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", "recipe=vla_tiny", "cluster=4x2xA100", "cluster.switches={a:['n[1-3]'],b:[n3]}")
    assert (ran.status, "n3 stands under a and b" in ran.err) == (2, True)
