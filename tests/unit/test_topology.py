"""Which GPUs a fast link joins, and which link a group of ranks goes over."""

from __future__ import annotations

import pytest

from dslaunch.hardware.topology import describe, group_link, tensor_domain
from tests.unit.test_cluster_data import cluster


@pytest.mark.parametrize(
    ("name", "counts", "domain"),
    [
        ("A100", {"gpus": 64}, 8),
        ("A100", {"nodes": 8, "gpus_per_node": 4}, 4),
        ("A100-80GB-PCIe", {"gpus": 64}, 8),
        ("V100", {"gpus": 2}, 2),
        ("MI300X", {"gpus": 16}, 8),
        ("GH200", {"gpus": 64}, 4),
        ("GB200", {"gpus": 4}, 4),
        ("GB200", {"gpus": 64}, 64),
        ("GB200", {"gpus": 72}, 72),
        ("GB200", {"gpus": 576}, 72),
        ("GB200", {"nodes": 36, "gpus_per_node": 2}, 36),
        ("GB300", {"nodes": 1, "gpus_per_node": 2}, 2),
    ],
)
def test_tensor_domain(name: str, counts: dict[str, int], domain: int) -> None:
    assert tensor_domain(cluster(name, **counts)) == domain


@pytest.mark.parametrize(
    ("name", "span", "kind"),
    [("A100", 8, "nvlink"), ("A100", 9, "infiniband"), ("GB200", 72, "nvlink"), ("GB200", 73, "infiniband")],
)
def test_group_link(name: str, span: int, kind: str) -> None:
    assert group_link(cluster(name, gpus=144), span).kind == kind


@pytest.mark.parametrize(("span", "gb_per_s"), [(2, 64), (4, 192), (8, 448)])
def test_a_small_group_has_few_of_the_links_from_gpu_to_gpu(span: int, gb_per_s: float) -> None:
    assert group_link(cluster("MI300X", gpus=8), span).gb_per_s == gb_per_s


def test_behind_a_switch_two_gpus_have_every_link() -> None:
    assert group_link(cluster("H100", gpus=8), 2).gb_per_s == 450


def test_reading_of_a_rack() -> None:
    assert describe(cluster("GB200", gpus=64)) == "64 GPUs = 16 nodes x 4 GB200"
