"""Every file in conf/cluster, composed by Hydra as for a user: valid, and each block with its source."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dslaunch.paths import data_root
from dslaunch.schema.cluster import Cluster

CONF = data_root() / "conf"
NAMES = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))
TYPES = [name for name in NAMES if name != "local"]


@cache
def composed(name: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(overrides=[f"+cluster={name}"]).cluster)  # type: ignore[return-value]


def cluster(name: str, **counts: int) -> Cluster:
    return Cluster.model_validate({**composed(name), **counts})


@pytest.mark.parametrize("name", TYPES)
def test_type_is_valid_and_leaves_the_counts_to_the_command_line(name: str) -> None:
    assert not {"gpus", "nodes", "gpus_per_node"} & set(composed(name))
    read = cluster(name, gpus=64)
    assert (read.node_count, read.slots) == (64 // read.node.gpus, read.node.gpus)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_names_its_source(name: str) -> None:
    blocks = {key: block for key, block in composed(name).items() if isinstance(block, dict)}
    assert {"gpu", "node", "intra"} <= set(blocks)
    assert [key for key, block in blocks.items() if not block["source"].strip()] == []


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("A100", "A100-80GB"),
        ("A800", "A800-80GB"),
        ("V100", "V100-32GB"),
        ("H100", "H100-80GB"),
        ("H100-96GB", "GH200-96GB"),
        ("GH200", "GH200-96GB"),
        ("H200", "H200-141GB"),
        ("B200", "B200-180GB"),
        ("B300", "B300-270GB"),
        ("GB200", "GB200-NVL72"),
        ("GB300", "GB300-NVL72"),
    ],
)
def test_alias_is_the_whole_name(alias: str, name: str) -> None:
    assert composed(alias) == composed(name)


@pytest.mark.parametrize("name", TYPES)
def test_figures_are_of_one_order(name: str) -> None:
    """Half precision beats fp32; device memory beats the links; links within a node beat the network."""
    read = cluster(name, gpus=8)
    peak, network = read.gpu.peak_tflops, read.network
    assert peak["fp16"] > 1.9 * peak["fp32"]
    assert peak.get("fp8", 2 * peak["fp16"]) == pytest.approx(2 * peak["fp16"], rel=0.02)
    assert network is not None
    assert read.gpu.hbm_gb_per_s > read.intra.gb_per_s >= read.gpu.pcie_gb_per_s
    assert read.intra.gb_per_s > network.gb_per_s
    assert network.latency_us > read.intra.latency_us
    assert read.gpu.context_gib < read.gpu.memory_gib
    assert (read.intra.kind in ("nvlink", "xgmi")) == (read.node.nvlink_domain > 1)
    assert (read.gpu.accelerator == "rocm") == (read.intra.kind == "xgmi")


@pytest.mark.parametrize("name", TYPES)
def test_links_from_gpu_to_gpu_add_up(name: str) -> None:
    read = cluster(name, gpus=8)
    if read.intra.peer_gb_per_s is not None:
        assert read.intra.gb_per_s == pytest.approx((read.node.gpus - 1) * read.intra.peer_gb_per_s)


def test_volta_has_no_bf16_tf32_fp8() -> None:
    assert set(cluster("V100", gpus=8).gpu.peak_tflops) == {"fp32", "fp16"}


def test_fp8_is_where_the_hardware_has_it() -> None:
    without = {n for n in TYPES if "fp8" not in cluster(n, gpus=8).gpu.peak_tflops}
    assert {n.partition("-")[0] for n in without} == {"A100", "A800", "A10G", "A6000", "RTX3090", "V100"}


def test_fabric_variants_differ_in_their_links_alone() -> None:
    infiniband, roce = composed("A100-80GB"), composed("A100-80GB-RoCE")
    assert roce.pop("network")["kind"] == "roce"
    assert infiniband.pop("network")["kind"] == "infiniband"
    assert roce == infiniband
    assert composed("A100-80GB-PCIe")["intra"]["kind"] == "pcie"


def test_local_is_two_processes_of_this_machine() -> None:
    local = cluster("local")
    assert (local.local, local.world_size, local.gpu.accelerator, local.network) == (True, 2, "cpu", None)
