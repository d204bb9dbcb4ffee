"""Seconds of kernels and collectives: by shape, by where a group stands, and by which table a GPU has."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from dslaunch.hardware.collectives import exchange, ring, scatter, send
from dslaunch.hardware.efficiency import SHIPPED, UNCALIBRATED, GpuRates, architecture, from_json
from dslaunch.hardware.kernels import Gemm, device, tiled
from dslaunch.hardware.software import Software
from dslaunch.hardware.topology import Group, inside
from tests.unit.test_cluster_data import cluster

FULL = GpuRates(link=1.0, network=1.0)
GB = 1e9


def test_a_large_product_is_bound_by_the_tensor_cores_and_a_thin_one_by_memory() -> None:
    gpu = device(cluster("A100", gpus=8).gpu, UNCALIBRATED, "bf16", Software("megatron"))
    large, thin = Gemm(8192, 8192, 8192), Gemm(1, 8192, 8192)
    assert gpu.gemm(large, 2) == pytest.approx(large.flops / gpu.peak, rel=0.15)
    assert gpu.gemm(thin, 2) == pytest.approx(2 * 8192**2 / gpu.memory, rel=0.01)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ((2048, 1800, 14400), (2048, 1728, 13824)),  # not a multiple of 64
        ((2048, 2048, 128), (2048, 2048, 4096)),  # a short inner width
        ((128, 128, 512), (4096, 4096, 512)),  # one tile for 108 multiprocessors
    ],
)
def test_shapes_leave_a_share_of_the_speed(
    slower: tuple[int, int, int], faster: tuple[int, int, int]
) -> None:
    assert 0 < tiled(*slower, 108) < 0.9 * tiled(*faster, 108) < 1


def test_narrow_heads_and_short_sequences_are_slower() -> None:
    gpu = device(cluster("H100", gpus=8).gpu, UNCALIBRATED, "bf16", Software("megatron", own_attention=True))
    plain = device(cluster("H100", gpus=8).gpu, UNCALIBRATED, "bf16", Software("torch"))
    assert gpu.core(1e12, 64, 8192) > gpu.core(1e12, 128, 8192)
    assert gpu.core(1e12, 128, 256) > gpu.core(1e12, 128, 8192)
    assert gpu.core(1e12, 128, 8192) < plain.core(1e12, 128, 8192)


@pytest.mark.parametrize(
    ("group", "members"), [(Group(64), 8), (Group(8, 8), 1), (Group(16, 4), 2), (Group(4), 4)]
)
def test_members_of_a_group_in_one_node(group: Group, members: int) -> None:
    assert inside(cluster("A100", gpus=128), group) == members


def test_a_ring_uses_the_ports_of_all_its_members_in_a_node() -> None:
    """Eight members a node share 8 ports of 25 GB/s; one a node has one. Latencies of 3.4 and 14 us a step."""
    nodes = cluster("A100", gpus=128)
    far = ring(nodes, Group(16, 8), 10 * GB, FULL)
    assert far == pytest.approx(10 / 25 + 16 * 14e-6 - 3.4e-6, rel=1e-3)
    assert ring(nodes, Group(128), 10 * GB, FULL) == pytest.approx(10 / 200, rel=0.02)
    assert ring(nodes, Group(8), 10 * GB, FULL) == pytest.approx(10 / 300, rel=0.01)
    assert scatter(nodes, Group(8), 10 * GB, FULL) == pytest.approx(7 / 8 * 10 / 300, rel=0.01)


def test_a_group_of_one_moves_nothing() -> None:
    assert ring(cluster("A100", gpus=8), Group(1), GB, FULL) == 0.0
    assert exchange(cluster("A100", gpus=8), Group(1), GB, FULL) == 0.0


def test_an_exchange_sends_to_other_nodes_over_one_port() -> None:
    nodes = cluster("H100", gpus=32)
    near, far = exchange(nodes, Group(8), GB, FULL), exchange(nodes, Group(32), GB, FULL)
    assert near == pytest.approx(7 / 8 / 450, rel=0.02)
    assert far == pytest.approx(24 / 32 / 50, rel=0.01)
    assert exchange(nodes, Group(32), GB, FULL, far_share=0.5) == pytest.approx(far / 2, rel=0.1)


def test_a_rack_is_one_domain() -> None:
    rack = cluster("GB200", gpus=72)
    assert ring(rack, Group(72), 9 * GB, FULL) == pytest.approx(9 / 900, rel=0.05)
    assert send(rack, 36, 9 * GB, FULL) < send(cluster("GB200", gpus=144), 72, 9 * GB, FULL)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100-40GB", "ampere"),
        ("H200", "hopper"),
        ("GB300", "blackwell"),
        ("MI300X", "cdna3"),
        ("V100", "volta"),
    ],
)
def test_architecture_by_name(name: str, found: str) -> None:
    assert architecture(cluster(name, gpus=8).gpu) == found


@pytest.mark.parametrize(
    ("peaks", "found"),
    [({"fp16": 100.0}, "volta"), ({"bf16": 100.0}, "ampere"), ({"bf16": 100.0, "fp8": 200.0}, "hopper")],
)
def test_an_unknown_gpu_has_the_table_of_the_nearest_by_data_types(
    peaks: dict[str, float], found: str
) -> None:
    unknown = cluster("A100", gpus=8).gpu.model_copy(update={"name": "NEW-1", "peak_tflops": peaks})
    assert SHIPPED.gpu(unknown) == SHIPPED.gpus[found]


def test_the_shipped_tables_are_physical() -> None:
    """Shares of a peak are below one; what a program adds to its products is not negative."""
    for name, row in SHIPPED.gpus.items():
        assert all(0 < share <= 1 for share in vars(row).values()), (name, row)
    for name, family in SHIPPED.families.items():
        assert 0 < family.hidden < 1, (name, family)
        assert family.launch_us > 0, (name, family)
        assert family.passes > 0.5, (name, family)


def test_tables_are_told_apart_by_their_hash() -> None:
    assert SHIPPED.sha256() != UNCALIBRATED.sha256()
    assert from_json(asdict(SHIPPED)) == SHIPPED
