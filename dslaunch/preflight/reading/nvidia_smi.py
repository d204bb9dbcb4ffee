"""What nvidia-smi prints: GPUs and processes as CSV, links as text.

Fields and their values: `nvidia-smi --help-query-gpu`; throttle reasons: nvml.h, nvmlClocksThrottleReasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons that are a fault of the machine; the others are idleness, or limits that someone set."""
_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s+Link (\d+): (?:([\d.]+) GB/s|<?inactive>?)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """One row of `--query-gpu` with what the probe asks: index, uuid, name, memory, driver, ECC errors."""

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    driver: str
    ecc_errors: int | None
    """Uncorrected since the driver was loaded; None where ECC is off or not there."""


@dataclass(frozen=True)
class App:
    """One row of `--query-compute-apps=pid,gpu_uuid,used_memory,process_name`."""

    pid: int
    gpu: str
    memory_mib: int | None
    name: str


def gpus(text: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(int(row[0]), row[1], row[2], _number(row[3]), row[4], _number(row[5])) for row in _rows(text, 6)
    )


def throttled(text: str) -> dict[int, tuple[str, ...]]:
    """By GPU why it is slowed down (`--query-gpu=index,clocks_event_reasons.active`)."""
    return {int(row[0]): _reasons(row[1]) for row in _rows(text, 2)}


def apps(text: str) -> tuple[App, ...]:
    return tuple(App(int(row[0]), row[1], _number(row[2]), row[3]) for row in _rows(text, 4))


def links(text: str) -> dict[int, tuple[float | None, ...]]:
    """By GPU its NVLinks in GB/s, None where one is inactive (`nvidia-smi nvlink --status`)."""
    found: dict[int, list[float | None]] = {}
    gpu = -1
    for line in text.splitlines():
        if head := _GPU.match(line.strip()):
            gpu = int(head[1])
            found[gpu] = []
        elif (link := _LINK.match(line)) and gpu >= 0:
            found[gpu].append(float(link[2]) if link[2] else None)
    return {index: tuple(each) for index, each in found.items()}


def _rows(text: str, columns: int) -> Iterator[list[str]]:
    """Rows that begin with a number: a tool's warnings stand between them. The last cell may hold commas."""
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split(",", columns - 1)]
        if len(row) == columns and row[0].isdigit():
            yield row


def _number(cell: str) -> int | None:
    """None for [N/A], [Not Supported], ERR! and the like."""
    digits = cell.split()[0] if cell else ""
    return int(digits) if digits.isdigit() else None


def _reasons(cell: str) -> tuple[str, ...]:
    try:
        bits = int(cell, 16)
    except ValueError:
        return ()
    return tuple(reason for bit, reason in _THROTTLED.items() if bits & bit)
