"""What a run's software does that time depends on, by its framework: a record's own words, or the
framework's defaults.

NeMo's and Megatron-Bridge's recipes set sequence parallelism with tp, reduce gradients in 16 bits beside the
backward pass and overlap tensor parallelism on GPUs with 8 in a node (NVIDIA-NeMo/Megatron-Bridge:
scripts/performance/configs and src/megatron/bridge/training/comm_overlap.py, 0.4.0). Megatron-LM's scripts
do so where they are told.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from benchmarks.records import Record

_OMNI_PATH = 6.25
"""GB/s of the network per GPU where `interconnect` names it without a figure: 4 x 100 Gb/s for 8 GPUs of Jean
Zay."""
_CARDS_OF_NODE = re.compile(r"(\d+) ?x ?(?:Omni-Path )?(\d+) ?Gb(?:/s|ps)\b")
_OF_NODE = re.compile(r"(\d+) ?Gb(?:/s|ps) (?:per node|node-node)")
_OF_GPU = re.compile(r"(\d+) ?Gb(?:/s|ps)(?: [\w-]+)? per GPU")
"""Of a record's `interconnect`: network cards of a node and their Gb/s, a node's Gb/s, a GPU's Gb/s."""
_CARDS = {"H100-96GB": {"name": "H100-SXM5-96GB", "memory_gib": 94.5, "hbm_gb_per_s": 2400}}
"""What differs from the cluster file: Meta's H100 with HBM2e, 500 W (pytorch/torchtitan:
benchmarks/llama3_h100_202412_torchtitan.md)."""


def is_recipe(record: Record) -> bool:
    """NeMo's or Megatron-Bridge's recipes, or a script that asks for the same (`overlap` in its notes)."""
    name = record.framework
    if (record.source.path or "").startswith("examples/llama"):
        return True
    return name.startswith(("NeMo", "Megatron-Bridge", "Megatron-Core")) and name != "NeMo Megatron"


def software(record: Record) -> dict[str, Any]:
    """Fields of `Software`."""
    words = " ".join((record.id, record.recompute_detail or "", record.notes or "")).lower()
    recipe = is_recipe(record)
    jax = "JAX" in record.framework
    eager = "eager" in words and "compile" not in words
    return {
        "own_attention": record.framework.startswith(("Mega", "NeMo")) or jax,
        "compiled": _compiled(record, eager) or jax,
        "recompute_modules": ("layernorm", "act") if "minimal_flash" in words else (),
        "half_gradients": recipe or (record.precision == "fp16" and record.framework.startswith("Megatron-")),
        "overlap_tp": "asynctp" in words
        or (recipe and (record.gpus_per_node or 8) == 8 and record.model.moe is None),
        "overlap_ep": _overlaps_experts(record, words),
        "dispatcher": _dispatcher(record, words),
        "graphs": _graphs(record, words),
        "fused_experts": _fused_experts(record),
        "dequantising": 20.0 if (record.source.repo or "").startswith("QwenLM/") else 5.0,
        "loss": "fused" if recipe else "plain",
    }


def _fused_experts(record: Record) -> bool:
    """Megatron-Bridge's MXFP8 recipes of mixtures since its container 26.06 (NVTE_CUTEDSL_FUSED_GROUPED_MLP in
    src/megatron/bridge/perf_recipes)."""
    mixture = "Bridge" in record.framework and record.model.moe is not None
    return mixture and _container(record) >= (26, 6) and record.precision == "mxfp8"


def _container(record: Record) -> tuple[int, int]:
    """(year, month) of NeMo's container, by the version that a record names; (0, 0): none."""
    found = re.match(r"(\d\d)\.(\d\d)", record.framework_version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _overlaps_experts(record: Record, words: str) -> bool:
    """What a record says; else as Megatron-Bridge's recipes of mixtures do, but for hybrids: on H100 in v0.2 and
    v0.3, of containers 25.11 and 26.02, and in MXFP8 since v0.5, of 26.06 (scripts/performance/configs)."""
    said = ('moe_a2a_overlap": "true', "1f1b overlap", "ep overlap on")
    if any(phrase in words for phrase in said):
        return True
    mixture = record.model.moe is not None and record.model.pattern is None
    if "Bridge" not in record.framework or not mixture or "moe_a2a_overlap" in words:
        return False
    when = _container(record)
    if (record.gpu.type or "").startswith("H100"):
        return (25, 11) <= when < (26, 4)
    return when >= (26, 6) and record.precision == "mxfp8"


def _dispatcher(record: Record, words: str) -> Literal["alltoall", "deepep"]:
    """Recipes take DeepEP or HybridEP; Megatron-Bridge's did so on nodes of 8 since v0.3, of container 26.02."""
    if not is_recipe(record) or "alltoall" in words or "(A2A)" in record.framework:
        return "alltoall"
    early = "Bridge" in record.framework and (0, 0) < _container(record) < (26, 2)
    flex = any(name in words for name in ("deepep", "hybridep"))
    return "alltoall" if early and not flex and (record.gpu.type or "").startswith(("B", "H")) else "deepep"


def _graphs(record: Record, words: str) -> bool:
    """What a recipe's detail says; Blackwell's recipes of mixtures of experts have graphs of attention and router
    (NVIDIA-NeMo/Megatron-Bridge 0.4.0: scripts/performance/configs/qwen/qwen3_workload_base_configs.py)."""
    said = 'cuda_graph_impl": "\\"' in words and 'cuda_graph_impl": "\\"none' not in words
    blackwell = (record.gpu.type or "").startswith(("B200", "B300", "GB200", "GB300"))
    return said or (is_recipe(record) and blackwell and record.model.moe is not None)


def _compiled(record: Record, eager: bool) -> bool:
    """torchtitan compiles unless it says otherwise; torchtune's table adds one thing a row, compiling as the
    third."""
    if record.framework == "torchtune":
        return not record.id.endswith(("baseline", "packed"))
    return record.framework == "torchtitan" and not eager


def sequence_parallel(record: Record) -> bool:
    """Recipes set it wherever tp is more than 1."""
    if record.sequence_parallel is not None:
        return record.sequence_parallel
    return (record.tp or 1) > 1 and is_recipe(record)


def overlaps(record: Record) -> bool:
    """Whether gradients are reduced beside the backward pass."""
    return is_recipe(record) or not record.framework.startswith(("Megatron", "NeMo"))


def cluster(record: Record, raw: dict[str, Any]) -> dict[str, Any]:
    """The cluster file with what the record says of its GPUs and its network."""
    card = _CARDS.get(record.gpu.type or "")
    found = {**raw, "gpu": {**raw["gpu"], **card}} if card else raw
    speed = network_gb_per_s(record.interconnect or "", record.gpus_per_node or raw["node"]["gpus"])
    if speed is None or not raw.get("network"):
        return found
    return {**found, "network": {**raw["network"], "gb_per_s": speed}}


def network_gb_per_s(words: str, slots: int) -> float | None:
    """What a GPU has of the network, in GB/s, by a record's words; None where they have no figure."""
    if several := _CARDS_OF_NODE.search(words):
        return int(several[1]) * int(several[2]) / 8 / slots
    if whole := _OF_NODE.search(words):
        return int(whole[1]) / 8 / slots
    if own := _OF_GPU.search(words):
        return int(own[1]) / 8
    return _OMNI_PATH if "Omni-Path" in words else None
