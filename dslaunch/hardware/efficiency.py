"""Shares of peak figures that real programs reach: data, handed to the plan as an argument.

A GPU has its own row, or that of its architecture, or that of the architecture whose data types it has. A
family of software (`hardware.software`) has a row of its own. No row is about a run: `python -m
benchmarks.calibrate` derives the shipped ones from published measurements of many.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.hardware import corrections
from dslaunch.hardware.corrections import NONE, Correction
from dslaunch.planfile import Band
from dslaunch.schema.cluster import Gpu

RATES = Path(__file__).parent / "tables" / "rates.json"
BANDS = Path(__file__).parent / "tables" / "bands.json"
"""Written by `python -m benchmarks.accuracy --write`."""
_ARCHITECTURES = {
    "V100": "volta", "A100": "ampere", "A800": "ampere", "A10G": "ga102", "RTX-A6000": "ga102", "RTX3090":
    "ga102", "H100": "hopper", "H200": "hopper", "GH200": "hopper", "L40S": "ada", "RTX4090": "ada", "B200":
    "blackwell", "GB200": "blackwell", "B300": "blackwell", "GB300": "blackwell", "MI300X": "cdna3",
    "MI325X": "cdna3", "MI355X": "cdna4",
}  # fmt: skip
"""By how a GPU's name begins."""


@dataclass(frozen=True)
class GpuRates:
    """What kernels and collectives reach on one GPU; shares of the figures in its cluster file."""

    matrix: float = 0.72
    """Of the dense 16-bit peak, in large matrix products."""
    narrow: float = 0.6
    """Of the dense fp8 peak, in large products of fp8."""
    attention: float = 0.5
    """Of the dense 16-bit peak, in the core of fused attention with heads of 128, by kernels that run on
    several architectures (FlashAttention-2, PyTorch's)."""
    own_attention: float = 0.5
    """The same by kernels written for the architecture (cuDNN, FlashAttention-3)."""
    hbm: float = 0.8
    """Of the memory bandwidth, in kernels that compute little."""
    link: float = 0.75
    """Of a link between a node's GPUs, in large collectives."""
    network: float = 0.75
    """Of the network."""


@dataclass(frozen=True)
class FamilyRates:
    """What a family of software costs beside its matrix products."""

    launch_us: float = 6.0
    """Host time to start a kernel, microseconds, on a host of today (`host_slowness`)."""
    passes: float = 1.0
    """Traffic of element-by-element kernels by that of the list in `model.work`, which is fully fused."""
    hidden: float = 0.9
    """Share of the communication beside computation that costs no time."""
    step_ms: float = 5.0
    """Host time of a step outside its micro-batches: optimizer's loop, norms, logging."""


@dataclass(frozen=True)
class Tables:
    """All rates."""

    gpus: Mapping[str, GpuRates] = field(default_factory=lambda: {"ampere": GpuRates()})
    """By GPU name, as in the cluster file, and by architecture."""
    families: Mapping[str, FamilyRates] = field(default_factory=dict)
    pcie: float = 0.8
    host_adam_gb_per_s: float = 50.0
    """Host memory traffic of a CPU optimizer, GB/s per rank."""
    memory_bands: Mapping[str, Band] = field(default_factory=dict)
    """By software family: how far measured memory was from predicted. A family that nobody measured has none."""
    time_bands: Mapping[str, Band] = field(default_factory=dict)
    """The same for step time."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """What a site's own runs say of all this, by `key`; none but by `dslaunch calibrate`."""

    def gpu(self, gpu: Gpu) -> GpuRates:
        """The row of a GPU, of its architecture, or of the nearest one by data types."""
        for name in (gpu.name, architecture(gpu)):
            if name in self.gpus:
                return self.gpus[name]
        return self.gpus[_nearest(gpu)] if _nearest(gpu) in self.gpus else GpuRates()

    def family(self, family: str, deepspeed: bool = False) -> FamilyRates:
        """The row of a family; Megatron's layers under DeepSpeed's engine are one of its own."""
        return self.families[self._row(family, deepspeed)]

    def key(self, gpu: str, family: str, deepspeed: bool) -> str:
        """What a correction is about, such as `A100-SXM4-80GB/transformers`."""
        return f"{gpu}/{self._row(family, deepspeed)}"

    def corrected(self, gpu: str, family: str, deepspeed: bool) -> Correction:
        """The correction of a GPU under a family."""
        return self.corrections.get(self.key(gpu, family, deepspeed), NONE) if self.corrections else NONE

    def _row(self, family: str, deepspeed: bool) -> str:
        return f"{family}_deepspeed" if deepspeed and f"{family}_deepspeed" in self.families else family

    def shipped_sha256(self) -> str:
        """Hash of the figures that a correction is about."""
        return replace(self, corrections={}).sha256()

    def sha256(self) -> str:
        """Hash of the figures, for the prediction's record."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def architecture(gpu: Gpu) -> str:
    """The architecture that a GPU's name tells, or the nearest by its data types."""
    return named(gpu.name) or _nearest(gpu)


@lru_cache(maxsize=256)
def named(name: str) -> str | None:
    known = [start for start in _ARCHITECTURES if name.startswith(start)]
    return _ARCHITECTURES[max(known, key=len)] if known else None


def _nearest(gpu: Gpu) -> str:
    """By what its tensor cores take: fp8 came with Hopper and Ada, bf16 with Ampere."""
    if gpu.accelerator == "rocm":
        return "cdna3"
    if "bf16" not in gpu.peak_tflops:
        return "volta"
    return "hopper" if "fp8" in gpu.peak_tflops else "ampere"


_HOSTS = {"volta": 1.3, "ampere": 1.3}
"""Time that the processors beside an architecture's cards take to start a kernel, by that of Hopper's and
Blackwell's: a DGX A100 has EPYC 7742 of 2019 at 3.4 GHz, a DGX H100 Xeon 8480C of 2023 at 3.8 GHz, which does
a sixth more a cycle."""


def host_slowness(gpu: Gpu) -> float:
    """Time of the host's own work by that of a host of today."""
    return _HOSTS.get(architecture(gpu), 1.0)


CARDS = {
    "H100-SXM5-96GB": 0.9,
    "H100-PCIE-80GB": 0.85,
    "A100-PCIE-80GB": 0.9,
    "B200-SXM-180GB": 0.95,
    "GB300": 1.05,
}
"""Speed of a card's matrix products by what its architecture reaches of the peak: lower where less power is
allowed (500 W for Meta's H100 with HBM2e, 350 and 300 W over PCIe, 1000 W in a DGX B200), higher where more
is (1400 W)."""


def faster(rates: GpuRates, by: float) -> GpuRates:
    """The row of a GPU whose tensor cores run `by` times as fast, for the same peak."""
    return replace(
        rates,
        matrix=rates.matrix * by,
        narrow=rates.narrow * by,
        attention=rates.attention * by,
        own_attention=rates.own_attention * by,
    )


UNCALIBRATED = Tables(
    gpus={
        "volta": GpuRates(matrix=0.84, attention=0.35, own_attention=0.35, network=0.7),
        "ampere": GpuRates(matrix=0.83, attention=0.52, own_attention=0.52),
        "ga102": GpuRates(matrix=0.8, attention=0.5, own_attention=0.5),
        "ada": GpuRates(matrix=0.75, attention=0.5, own_attention=0.5),
        "hopper": GpuRates(matrix=0.67, narrow=0.6, attention=0.3, own_attention=0.52),
        "blackwell": GpuRates(matrix=0.6, narrow=0.6, attention=0.2, own_attention=0.5),
        "cdna3": GpuRates(matrix=0.5, narrow=0.45, attention=0.3, own_attention=0.35),
        "cdna4": GpuRates(matrix=0.55, narrow=0.5, attention=0.3, own_attention=0.35),
    },
    families={
        "megatron": FamilyRates(launch_us=48.0, passes=1.2, hidden=0.9, step_ms=15.0),
        "megatron_deepspeed": FamilyRates(launch_us=40.0, passes=1.2, hidden=0.8, step_ms=30.0),
        "torch": FamilyRates(launch_us=15.0, passes=2.2, hidden=0.9, step_ms=10.0),
        "transformers": FamilyRates(launch_us=80.0, passes=3.5, hidden=0.8, step_ms=30.0),
    },
)
"""Round figures from vendors' and papers' measurements, the calibration's starting point: large GEMMs of
cuBLAS reach 250-265 of the A100's 312 TFLOPS, 650-750 of the H100's 989; FlashAttention-2 forward and
backward 180-200 of an A100's 312 (arXiv:2307.08691, figure 4), 350-450 of an H100's 989 (arXiv:2407.08608,
figures 5 and 6); NCCL's bus bandwidth 70-80 % of a link's one way."""


def from_json(raw: dict[str, Any]) -> Tables:
    """The inverse of `dataclasses.asdict`."""
    gpus = {name: GpuRates(**row) for name, row in raw["gpus"].items()}
    families = {name: FamilyRates(**row) for name, row in raw["families"].items()}
    bands = {key: _bands(raw.get(key, {})) for key in ("memory_bands", "time_bands")}
    return Tables(**{**raw, "gpus": gpus, "families": families, **bands})


def _bands(raw: Mapping[str, Any]) -> dict[str, Band]:
    return {family: Band(**band) for family, band in raw.items()}


def _shipped() -> Tables:
    found = json.loads(BANDS.read_text(encoding="utf-8"))
    rates = from_json(json.loads(RATES.read_text(encoding="utf-8")))
    return replace(rates, memory_bands=_bands(found["memory"]), time_bands=_bands(found["time"]))


SHIPPED = _shipped()
"""The tables that come with the package."""


def of_site(folder: Path | None) -> Tables:
    """The shipped tables, with what the site's own runs correct of them.

    Raises:
        ConfigError: an efficiency.yaml that cannot be read, or whose corrections are of other rates.
    """
    path = folder / corrections.FILE if folder else None
    if path is None or not path.is_file():
        return SHIPPED
    of, found = corrections.read(path)
    if of != SHIPPED.sha256():
        raise ConfigError(
            f"{path}: corrects rates {of[:12]}, and this dslaunch ships {SHIPPED.sha256()[:12]}. Take the file "
            "away, and calibrate from runs that this version launched."
        )
    return replace(SHIPPED, corrections=found)
