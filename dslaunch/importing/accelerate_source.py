"""The keys of an accelerate configuration, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.importing.deepspeed_file import flattened
from dslaunch.importing.imported import Note

_WITHOUT_BEARING = frozenset({
    "compute_environment", "machine_rank", "main_training_function", "same_network", "gpu_ids", "debug",
    "main_process_ip", "rdzv_backend", "enable_cpu_affinity", "use_cpu", "tpu_use_cluster", "tpu_use_sudo",
    "tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "commands", "command_file", "downcast_bf16",
})  # fmt: skip
"""What the launcher finds out at launch, or what belongs to machines that dslaunch does not start."""
SECTIONS = ("deepspeed_config", "fsdp_config", "parallelism_config", "fp8_config", "megatron_lm_config")
_PRECISIONS = {"no": "fp32", "fp8": "bf16", "fp16": "fp16", "bf16": "bf16"}
DEGREES = "parallelism_config.parallelism_config_"
"""What the keys of accelerate's ParallelismConfig begin with."""
_OFF: tuple[Any, ...] = (None, False, "", "no", "NO", "none", {}, [])


class Source:
    """The file's keys, dotted; what nobody takes is told.

    Raises:
        ConfigError: a section that is none, or a precision that accelerate has not.
    """

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self.path = path
        for name in SECTIONS:
            if not isinstance(config.get(name) or {}, Mapping):
                raise self.wrong(name, config[name], "a section with keys of its own")
        self.left = dict(flattened(config))
        self.notes: list[Note] = []
        self.precision = self._precision()

    def wrong(self, key: str, value: object, right: str) -> ConfigError:
        """The error for a value of the wrong kind."""
        return ConfigError(f"{self.path}: {key} is {value!r}: {right} belongs there.")

    def take(self, key: str) -> Any:
        """The value; None where it is absent."""
        return self.left.pop(key, None)

    def whole(self, key: str, least: int = 1) -> int | None:
        """A whole number; None where it is absent. Raises ConfigError where it is none."""
        value = self.take(key)
        if value is not None and (type(value) is not int or value < least):
            raise self.wrong(key, value, f"a whole number of {least} or more")
        return None if value is None else int(value)

    def text(self, key: str) -> str | None:
        """A text; None where it is absent or empty. Raises ConfigError where it is none."""
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, value, "text")
        return value or None

    def note(self, key: str, reason: str) -> None:
        """Something that is not carried over as it stands."""
        self.notes.append(Note(key, reason))

    def refuse_cut(self, *names: str) -> None:
        """Raises ConfigError where replicas are cut in a way that the engine has not: the batch would be wrong."""
        for name in names:
            degree = self.whole(f"{DEGREES}{name}") or 1
            if degree > 1:
                raise ConfigError(
                    f"{self.path}: parallelism_config_{name} is {degree}: not planned with this distributed_type. "
                    "Take it out, or write a recipe with engine=deepspeed and strategy=ulysses or strategy=autotp."
                )

    def finish(self) -> tuple[Note, ...]:
        """The notes, with one for each key that says something and that nobody took."""
        for key, value in self.left.items():
            undivided = key.startswith(DEGREES) and value == 1
            if value not in _OFF and not undivided and key not in _WITHOUT_BEARING:
                shown = "a list" if isinstance(value, list) else value
                self.note(key, f"{shown}: no key of dslaunch stands for it")
        return tuple(self.notes)

    def _precision(self) -> str:
        """training.precision; `no` without quotes is false to YAML."""
        mixed = str(self.left.pop("mixed_precision", None) or "no").lower()
        if mixed not in _PRECISIONS:
            raise ConfigError(
                f"{self.path}: mixed_precision is {mixed}. Known are {listed(_PRECISIONS)}."
                f"{nearest(mixed, _PRECISIONS)}"
            )
        if mixed == "fp8":
            self.note("mixed_precision", "fp8: planned as bf16")
        return _PRECISIONS[mixed]
