"""What the GPUs of a host do, told every 15 seconds: gpus.py OUT, which rank.sh starts beside a host's first rank.

OUT gets one JSON object, replaced each time: `counter` (what `busy` is), `busy` and `nvlink_share`, a number for
each GPU from 0 to 1, the latter null where it is not known, and `slowed`, the GPUs whose clock heat or power holds
down; or `unseen`, why there is nothing. SM activity (the share of time in which the multiprocessors had work,
DCGM_FI_PROF_SM_ACTIVE) comes from dcgmi where its host engine answers; else nvidia-smi's utilization, the share of
time in which any kernel ran, which one small kernel fills.

This file is written into the run folder. It needs Python 3.9 alone, and ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EVERY_S = 15.0
_LIMIT_S = 10.0
_POLL_S = 0.5
_FIELDS = "1002,1011,1012"
"""DCGM_FI_PROF_SM_ACTIVE, _NVLINK_TX_BYTES and _NVLINK_RX_BYTES (bytes a second): dcgmlib/dcgm_fields.h."""
_DMON = ("dcgmi", "dmon", "-e", _FIELDS, "-d", "1000", "-c", "2")
_ROW = re.compile(r"^\s*GPU (\d+)\s+(\S+)\s+(\S+)\s+(\S+)\s*$")
_SMI = ("nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")
_CLOCKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The second is what drivers before 535 call it."""
_FAULTS = 0x08 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, heat by software and by hardware, power brake (`nvidia-smi --help-query-gpu`)."""
_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s+Link \d+: ([\d.]+) GB/s")


def by_dcgm(text: str) -> dict[int, tuple[float, float | None]]:
    """By GPU its SM activity, and its NVLink traffic one way in bytes a second: the last row counts.

    The form is dcgmi/DeviceMonitor.cpp's: `GPU N` and a value a field, N/A where there is none.
    """
    found: dict[int, tuple[float, float | None]] = {}
    for row in filter(None, map(_ROW.match, text.splitlines())):
        active, *links = (_number(cell) for cell in row.groups()[1:])
        moved = [each for each in links if each is not None]
        if active is not None:
            found[int(row[1])] = (active, max(moved) if moved else None)
    return found


def by_nvidia_smi(text: str) -> dict[int, float]:
    """By GPU utilization, from 0 to 1."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return {int(row[0]): float(row[1]) / 100 for row in rows if len(row) == 2 and all(map(str.isdigit, row))}


def slowed(text: str) -> list[int]:
    """The GPUs whose clock heat or power holds down (`--query-gpu=index,clocks_event_reasons.active`)."""
    rows = (re.fullmatch(r"(\d+),\s*0x([0-9a-fA-F]+)", line.strip()) for line in text.splitlines())
    return [int(row[1]) for row in rows if row and int(row[2], 16) & _FAULTS]


def link_speeds(text: str) -> dict[int, float]:
    """By GPU the bytes a second that its NVLinks carry one way (`nvidia-smi nvlink --status`)."""
    found: dict[int, float] = {}
    gpu = -1
    for line in text.splitlines():
        if head := _GPU.match(line.strip()):
            gpu = int(head[1])
        elif (link := _LINK.match(line)) and gpu >= 0:
            found[gpu] = found.get(gpu, 0.0) + float(link[1]) * 1e9
    return found


def sample(speeds: dict[int, float]) -> dict[str, Any]:
    """What OUT gets."""
    clocks = next(filter(None, (_said(*_SMI[:1], f"--query-gpu=index,{name}", _SMI[2]) for name in _CLOCKS)), "")
    held = {"slowed": slowed(clocks)}
    if seen := by_dcgm(_said(*_DMON)):
        shares = [_share(moved, speeds.get(gpu, 0.0)) for gpu, (_, moved) in sorted(seen.items())]
        busy = [active for _, (active, _) in sorted(seen.items())]
        return {"counter": "sm_active", "busy": busy, "nvlink_share": shares, **held}
    if used := by_nvidia_smi(_said(*_SMI)):
        busy = [value for _, value in sorted(used.items())]
        return {"counter": "gpu_utilization", "busy": busy, "nvlink_share": [None] * len(busy), **held}
    return {"unseen": "neither dcgmi nor nvidia-smi says what the GPUs do"}


def main(out: Path) -> None:
    parent, speeds = os.getppid(), link_speeds(_said("nvidia-smi", "nvlink", "--status"))
    while os.getppid() == parent:
        told = {**sample(speeds), "host": os.uname().nodename, "at": time.time()}
        unfinished = out.with_name(f".{out.name}")
        unfinished.write_text(json.dumps(told) + "\n", encoding="utf-8")
        unfinished.replace(out)
        if "unseen" in told:
            return
        limit = time.monotonic() + EVERY_S
        while os.getppid() == parent and time.monotonic() < limit:
            time.sleep(_POLL_S)


def _said(*words: str) -> str:
    """What a tool prints; nothing where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LIMIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _share(moved: float | None, speed: float) -> float | None:
    return moved / speed if moved is not None and speed else None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
