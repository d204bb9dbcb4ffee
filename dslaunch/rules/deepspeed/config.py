"""A DeepSpeed JSON as DeepSpeed takes it, and rules that look at one such file at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from dslaunch.engines.deepspeed_keys import release
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.coercion import number
from dslaunch.rules.deepspeed.zero import on, stage
from dslaunch.rules.registry import Check, Edit, Hit, RaisedBy, Severity, hit, rule
from dslaunch.rules.scripts.tree import is_none, scripts
from dslaunch.rules.settings import Settings
from dslaunch.rules.topology import component, replicas

ZERO = "zero_optimization"
_OWN_OPTIMIZERS = frozenset({
    "adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb",
    "zerooneadam",
})  # fmt: skip
"""Names that DeepSpeed takes in any case (0.19.8; the last three up to 0.19.6):
deepspeedai/DeepSpeed:deepspeed/runtime/config.py DEEPSPEED_OPTIMIZERS."""


@dataclass(frozen=True)
class Config:
    """One DeepSpeed JSON, with what is known beside it. Keys are dotted paths."""

    file: File
    plan: Plan | None
    settings: Settings
    files: FileSet | None = None
    """What stands beside it, where it is the only such file."""

    def hands(self, name: str, place: int) -> bool:
        """Whether a script beside it hands deepspeed.initialize this argument."""
        if self.files is None:
            return False
        calls = (call for script in scripts(self.files) for call in script.deepspeed)
        given = (call.argument(name, place) for call in calls)
        return any(each is not None and not is_none(each) for each in given)

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self.file.get(*key.split("."))

    def has(self, key: str) -> bool:
        """Whether the key stands in the file, with null too."""
        section, _, name = key.rpartition(".")
        holder = self.file.get(*section.split(".")) if section else self.file.value
        return isinstance(holder, dict) and name in holder

    def on(self, key: str) -> bool:
        """Whether DeepSpeed reads the value as true."""
        return on(self.get(key))

    def off(self, key: str) -> bool:
        """Whether the key stands, and DeepSpeed reads its value as false."""
        return self.get(key) in (False, 0, "false", "False", "0", "no", "off") and self.has(key)

    def number(self, key: str) -> float | None:
        """The value as a finite number; None where it is none."""
        value = self.get(key)
        size = None if isinstance(value, bool) else number(value)
        return size if size is not None and isfinite(size) else None

    def at_least(self, version: str) -> bool:
        """Whether the DeepSpeed that reads the file is this one or newer."""
        return release(self.settings.deepspeed_version) >= release(version)

    @cached_property
    def stage(self) -> int | None:
        """The ZeRO stage; None where what stands there is none."""
        return stage(self.file)

    @property
    def sharded(self) -> bool:
        """Whether a ZeRO optimizer runs: stage 1, 2 or 3."""
        return self.stage in (1, 2, 3)

    def offload(self, name: str) -> str:
        """none | cpu | nvme; `name` is optimizer or param."""
        device = self.get(f"{ZERO}.offload_{name}.device")
        if device in ("cpu", "nvme"):
            return str(device)
        old = "cpu_offload" if name == "optimizer" else "cpu_offload_param"
        return "cpu" if self.on(f"{ZERO}.{old}") else "none"

    @property
    def bf16_section(self) -> str:
        """The section that counts: bfloat16 is read only where bf16 is missing or null."""
        return "bfloat16" if self.get("bf16") is None and self.get("bfloat16") is not None else "bf16"

    @property
    def bf16(self) -> bool:
        """Whether the model is cast to bfloat16."""
        return self.on(f"{self.bf16_section}.enabled")

    @property
    def fp16(self) -> bool:
        """Whether the model is cast to float16."""
        return self.on("fp16.enabled")

    @property
    def precision(self) -> str:
        """bf16 | fp16 | fp32: the model's type."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def precision_open(self) -> bool:
        """Whether Hugging Face's Trainer is to fill the precision in."""
        return "auto" in (self.get("bf16.enabled"), self.get("fp16.enabled"))

    @property
    def optimizer(self) -> str:
        """The optimizer's name as DeepSpeed looks it up (its own in lower case); empty where none is named."""
        name = self.get("optimizer.type")
        if not isinstance(name, str):
            return ""
        return name.lower() if name.lower() in _OWN_OPTIMIZERS else name

    @property
    def world(self) -> int | None:
        """Ranks in all, where known."""
        return self.plan.world_size if self.plan else self.settings.world_size

    @property
    def replicas(self) -> list[int]:
        """The data-parallel sizes that the batch may be divided by; see topology.replicas."""
        return replicas(self.plan, self.file, self.settings)

    @property
    def stages(self) -> int:
        """Pipeline stages, where known; else 1."""
        found = component(self.plan, self.file) if self.plan else None
        return found[1].pp if found else self.settings.pp or 1

    def hit(
        self, key: str, message: str, fix: str, *, severity: Severity | None = None,
        raised_by: RaisedBy | None = None, edit: Edit | None = None,
    ) -> Hit:  # fmt: skip
        """A hit at `key`, or at the nearest section above it."""
        found = hit(self.file, tuple(key.split(".")), message, fix, severity=severity, raised_by=raised_by)
        return found if edit is None else Hit(**{**vars(found), "edit": edit})


ConfigCheck = Callable[[Config], Iterator[Hit]]


def configs(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Config]:
    """Each DeepSpeed JSON that holds an object."""
    found = files.of("deepspeed_json")
    for file in found:
        if isinstance(file.value, dict):
            yield Config(file, plan, settings, files if len(found) == 1 else None)


def one_config(plan: Plan | None, files: FileSet, settings: Settings) -> Config | None:
    """The DeepSpeed JSON that a script beside it is started with; None where there are several, or none."""
    found = list(configs(plan, files, settings))
    return found[0] if len(found) == 1 else None


def config_rule(
    rule_id: str, *, severity: Severity, evidence: str, raised_by: RaisedBy = "nobody", since: str = "",
    until: str = "",
) -> Callable[[ConfigCheck], ConfigCheck]:  # fmt: skip
    """Register a rule that looks at one DeepSpeed JSON."""

    def register(check_config: ConfigCheck) -> ConfigCheck:
        def check(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
            for config in configs(plan, files, settings):
                yield from check_config(config)

        check.__doc__ = check_config.__doc__
        registered: Check = check
        rule(
            rule_id, severity=severity, raised_by=raised_by, since=since, until=until,
            evidence=f"deepspeedai/DeepSpeed:{evidence}",
        )(registered)  # fmt: skip
        return check_config

    return register
