"""What is known of one host: its probe's answer, in types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dslaunch.preflight.probe import MARK, SCHEMA
from dslaunch.preflight.reading import dcgmi, ethtool, ibstat, kernel, nvidia_smi
from dslaunch.remote import SSH_FAILED, Answer

_NO_PYTHON = 127
"""A shell's exit status where there is no such command; 126: it cannot be run (POSIX, 2.8.2)."""


@dataclass(frozen=True)
class Space:
    """A file system: bytes in all, and bytes that this user may still write."""

    size: int
    free: int


@dataclass(frozen=True)
class Folder:
    path: str
    found: str
    """The nearest folder that is there."""
    fault: str
    """Why a file could not be written in it; empty where one could."""
    kind: str
    """Type of its file system, such as nfs4."""
    source: str
    """What is mounted there, such as server:/export."""
    space: Space


@dataclass(frozen=True)
class Code:
    """The script's folder."""

    digest: str
    """Empty where the script is missing."""
    named: Mapping[str, str]
    """Digests of its first files, by name."""
    files: int


@dataclass(frozen=True)
class Gpus:
    """What there is to see of the GPUs."""

    devices: int
    """NVIDIA's device files."""
    found: tuple[nvidia_smi.Gpu, ...] | None
    """None where nvidia-smi is missing or fails."""
    fault: str
    """What nvidia-smi said where it failed."""
    apps: tuple[nvidia_smi.App, ...] = ()
    throttled: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By GPU why it is slowed down."""
    links: Mapping[int, tuple[float | None, ...]] = field(default_factory=dict)
    """By GPU its NVLinks in GB/s; None: inactive."""
    visible: tuple[str, ...] = ()
    """Indices or ids of CUDA_VISIBLE_DEVICES; empty: all."""
    diagnosis: tuple[str, ...] | None = None
    """Tests of DCGM's that failed; None where it did not run."""


    @property
    def usable(self) -> tuple[nvidia_smi.Gpu, ...]:
        """Those that ranks may use."""
        found = self.found or ()
        return tuple(
            gpu for gpu in found
            if not self.visible or str(gpu.index) in self.visible or gpu.uuid.startswith(self.visible)
        )  # fmt: skip


@dataclass(frozen=True)
class Host:
    """One host, as it was seen."""

    name: str
    """As the launching machine knows it."""
    reached: bool
    fault: str = ""
    """Why there is no answer."""
    no_python: bool = False
    """It was reached, and has no Python of that name."""
    clock_s: float | None = None
    """Its clock minus this machine's, too high by the way of one message."""
    silent: tuple[str, ...] = ()
    """Parts that did not answer in time."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Parts that could not be asked, and why."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """The parts that answered, as the probe gave them."""

    @property
    def answered(self) -> bool:
        return self.reached and not self.fault

    @property
    def system(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.said.get("system", {})
        return found

    @property
    def versions(self) -> dict[str, str]:
        """By what: python, torch, deepspeed, nccl, cuda, driver and other packages."""
        software = self.said.get("software")
        if software is None:
            return {}
        found = {"python": software["python"], **software["versions"]}
        drivers = {gpu.driver for gpu in self.gpus.found or ()}
        return {**found, **({"driver": drivers.pop()} if drivers else {})}

    @cached_property
    def gpus(self) -> Gpus:
        said = self.said.get("gpus", {"devices": 0})
        smi = said.get("smi")
        if smi is None:
            return Gpus(said["devices"], None, "")
        found = nvidia_smi.gpus(smi["out"]) if smi["status"] == 0 else None
        fault = "" if found is not None else (smi["out"] + smi["err"]).strip()
        diagnosis = dcgmi.failed(said["dcgmi"]["out"]) if "dcgmi" in said else None
        return Gpus(
            said["devices"],
            found,
            fault,
            nvidia_smi.apps(said["apps"]["out"]),
            nvidia_smi.throttled(said["throttled"]["out"]),
            nvidia_smi.links(said["nvlink"]["out"]),
            tuple(word.strip() for word in said["visible"].split(",") if word.strip()),
            diagnosis,
        )

    @property
    def ports(self) -> tuple[ibstat.Port, ...] | None:
        """InfiniBand and RoCE ports; None where ibstat is missing or fails."""
        said = self.said.get("network", {}).get("ibstat")
        return ibstat.ports(said["out"]) if said and said["status"] == 0 else None

    @property
    def links(self) -> dict[str, ethtool.Link]:
        """Ethernet links by interface."""
        said = self.said.get("network", {}).get("ethtool", {})
        read = {name: ethtool.link(each["out"]) for name, each in said.items()}
        return {name: link for name, link in read.items() if link}

    @property
    def events(self) -> tuple[kernel.Event, ...] | None:
        """None where the kernel's messages may not be read."""
        said = self.said.get("kernel")
        return tuple(kernel.events(said["out"])) if said and said["status"] == 0 else None

    @property
    def folders(self) -> dict[str, Folder]:
        return {kind: _folder(each) for kind, each in self.said.get("folders", {}).items()}

    @property
    def code(self) -> Code | None:
        """None where there is no script, or the host could not say."""
        said = self.said.get("code")
        if not said:
            return None
        return Code(said.get("digest", ""), said.get("named", {}), said.get("files", 0))


def _folder(said: Mapping[str, Any]) -> Folder:
    mount, space = said["mount"], Space(said["size"], said["free"])
    return Folder(said["path"], said["found"], said["fault"], mount["kind"], mount["source"], space)


def host_from(answer: Answer) -> Host:
    """One host's facts from what its command came to."""
    at = answer.out.rfind(MARK)
    if at < 0:
        if answer.status in (_NO_PYTHON, _NO_PYTHON - 1):
            return Host(answer.host, reached=True, fault=answer.why, no_python=True)
        return Host(answer.host, reached=answer.status not in (None, SSH_FAILED), fault=answer.why)
    said = json.loads(answer.out[at + len(MARK) :].splitlines()[0])
    assert said["schema"] == SCHEMA
    return Host(
        answer.host,
        reached=True,
        clock_s=said["time"] - answer.heard if answer.heard else None,
        silent=tuple(said["silent"]),
        failed=said["failed"],
        said=said["said"],
    )
