"""A site's own cluster in a file of ten lines, sizes that cannot be, and clusters that are mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dslaunch.schema.cluster import Cluster, in_parts
from tests.command import RECIPE, CommandLine, make_site
from tests.unit.test_cluster_data import cluster, composed

SITE = """\
# Our cluster: 40 hosts of 8 A100, two 200 Gb/s ports a host.
defaults: [A100-80GB, _self_]
available_nodes: 40
price_per_gpu_hour: 1.85
price_source: internal price list, 2026
node:
  host_memory_gib: 1007
network:
  kind: roce
  gb_per_s: 6.25
"""


def fault(**changes: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        Cluster.model_validate({**composed("A100"), **changes})
    return raised.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("choice", "gpus"), [("mysite", 320), ("32xmysite", 32), ("4x4xmysite", 16), ("320xmysite", 320)]
)
def test_a_site_is_planned_for(dslaunch: CommandLine, tmp_path: Path, choice: str, gpus: int) -> None:
    site = make_site(tmp_path, RECIPE, mysite=SITE)
    ran = dslaunch(
        "plan",
        "recipe=mine",
        f"cluster={choice}",
        "training.global_batch=320",
        f"--config-dir={site}",
        "--json",
    )
    assert ran.status == 0, ran.err
    assert (ran.json["world_size"], ran.json["host_limit_gib"]) == (gpus, 1007)


def test_a_site_is_listed(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path, mysite=SITE)
    rows = dslaunch("clusters", f"--config-dir={site}").out.splitlines()
    assert [row.split() for row in rows if row.startswith("mysite")] == [
        ["mysite", "A100-SXM4-80GB", "80", "GiB", "8", "a", "node", "roce"]
    ]


def test_more_than_the_site_has(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path, RECIPE, mysite=SITE)
    ran = dslaunch("plan", "recipe=mine", "cluster=328xmysite", f"--config-dir={site}")
    assert (ran.status, ran.out) == (2, "")
    assert "41 nodes, but available_nodes is 40: 40 x 8 = 320 GPUs" in ran.err


def test_a_site_keeps_what_it_does_not_say() -> None:
    read = cluster("A100", available_nodes=3)
    assert (read.node_count, read.world_size, read.price_per_gpu_hour) == (3, 24, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "how many GPUs?"),
        ({"gpus": 20}, "20 = 2 x 8 + 4. Write NODESxGPUSxTYPE, such as cluster=4x5xTYPE"),
        ({"gpus": 13}, "such as cluster=13x1xTYPE"),
        ({"gpus": 16, "nodes": 4}, "gpus is 16, but 4 nodes x 8 GPUs = 32"),
        ({"nodes": 1, "gpus_per_node": 16}, "a node has 8 A100-SXM4-80GB"),
        ({"nodes": 2, "network": None}, "2 nodes need a network"),
        ({"nodes": 2, "hosts": ["n1"]}, "hosts names 1 hosts, but the cluster has 2 nodes"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    assert words in fault(**changes)


def test_two_types_of_gpu_are_refused_with_two_ways_out() -> None:
    message = fault(mixed=[{"nodes": 4, "gpus": 8, "gpu": "A100"}, {"nodes": 2, "gpus": 8, "gpu": "H100"}])
    assert "A100 and H100 in one run are not planned for" in message
    assert "cluster= 4x8xA100, 2x8xH100" in message
    assert "all 6 nodes as the GPU with less memory: cluster=6x8xTYPE" in message


def test_unequal_slots_are_counted_in_parts() -> None:
    mixed = [{"nodes": 1, "gpus": 4}, {"nodes": 2, "gpus": 8}]
    assert "mixed says how many GPUs there are, and gpus does too" in fault(mixed=mixed, gpus=20)
    assert "every host has 8 GPUs. Write cluster=3x8xTYPE" in fault(
        mixed=[{"nodes": 1, "gpus": 8}, {"nodes": 2, "gpus": 8}]
    )
    whole = Cluster.model_validate({**composed("A100"), "nodes": 1})
    parts = in_parts(Cluster.model_validate({**composed("A100"), "mixed": mixed}))
    assert (parts.unequal, parts.slots, parts.node_count, parts.world_size) == ((8, 8, 4), 4, 5, 20)
    assert parts.node.host_memory_gib == whole.node.host_memory_gib / 2
    assert "16 GPUs in a host, but a node has 8" in fault(
        mixed=[{"nodes": 1, "gpus": 4}, {"nodes": 2, "gpus": 16}]
    )


def test_hosts_of_other_partitions_are_kinds_most_gpus_first() -> None:
    mixed = [
        {"nodes": 1, "gpus": 4, "constraint": "small"},
        {"nodes": 2, "gpus": 8, "partition": "big"},
        {"nodes": 3, "gpus": 4, "constraint": "small"},
    ]
    cluster = Cluster.model_validate({**composed("A100"), "mixed": mixed})
    kinds = [(kind.nodes, kind.gpus, kind.partition, kind.constraint) for kind in cluster.kinds]
    assert kinds == [(2, 8, "big", ""), (4, 4, "", "small")]
    assert cluster.unequal == (8, 8, 4, 4, 4, 4)
    alike = [{"nodes": 1, "gpus": 8}, {"nodes": 2, "gpus": 8, "partition": "other"}]
    cluster = Cluster.model_validate({**composed("A100"), "mixed": alike})
    assert (cluster.unequal, cluster.slots, cluster.node_count, len(cluster.kinds)) == ((), 8, 3, 2)


@pytest.mark.parametrize(
    "word",
    [
        "launcher.slurm.spare_nodes=1", "launcher.slurm.segment=1", "launcher.slurm.at_once=1",
        "launcher.slurm.rank_order=switches", "launcher.slurm.exclusive=false", "restart.elastic=true",
    ],
)  # fmt: skip
def test_what_hosts_of_several_kinds_cannot_do_is_refused(word: str, dslaunch: CommandLine) -> None:
    kinds = "cluster.mixed=[{nodes: 2, gpus: 8}, {nodes: 1, gpus: 8, partition: other}]"
    ran = dslaunch("plan", "recipe=llama3_8b", "cluster=A100", kinds, "training.global_batch=120", word)
    assert (ran.status, ran.out) == (2, "")
    assert f"{word.partition('=')[0]}: goes with hosts that are alike" in ran.err


def test_unequal_hosts_are_planned_before_their_names_are_known(dslaunch: CommandLine) -> None:
    words = ["recipe=llama3_8b", "cluster=A100", "cluster.mixed=[{nodes: 2, gpus: 8}, {nodes: 1, gpus: 4}]"]
    ran = dslaunch("plan", *words, "training.global_batch=120")
    assert ran.status == 0, ran.err
    assert "20 GPUs = 2 x 8 + 1 x 4 A100-SXM4-80GB, planned as 5 parts of 4" in ran.out
