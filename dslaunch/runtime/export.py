"""A checkpoint as Hugging Face reads it: config.json and safetensors, in transformers' names.

    OUT/model.safetensors, or model-00001.safetensors ... with model.safetensors.index.json
    OUT/config.json           where transformers has a class that reads these files and computes the same

A model of several components gets a folder for each: transformers has no class for the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.runtime.checkpoints import PLAN, check_readable, find
from dslaunch.runtime.checks import read_plan
from dslaunch.runtime.graph import build_model, unset_model
from dslaunch.runtime.held import WEIGHT
from dslaunch.runtime.hf_names import twin_of
from dslaunch.runtime.own import is_own
from dslaunch.runtime.store import Source
from dslaunch.runtime.tensorfile import Entry, write
from dslaunch.runtime.weights import there

FILE_BYTES = 5 * 10**9
"""transformers' own limit of a file (save_pretrained, max_shard_size)."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Exported:
    """One component."""

    component: str
    folder: Path
    config: dict[str, Any]
    """Empty where transformers has no class for it."""
    tensors: int


def export(checkpoint: Path, to: Path) -> list[Exported]:
    """Write the weights of the checkpoint in `checkpoint` into `to`, in the precision of its training.

    One tensor is held at a time; where components are frozen and the checkpoint leaves them out, the whole model.

    Raises:
        ConfigError: no checkpoint, or something in `to`.
    """
    folder = find(checkpoint)
    plan = read_plan(folder / PLAN)
    check_readable(folder, plan)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"-o {to}: not empty. Name a new folder.")
    weights = _weights(plan, Source(folder))
    with torch.device("meta"):
        model = unset_model(plan)
    folders = {name: to if len(model.parts) == 1 else to / name for name in model.parts}
    return [_component(plan, name, part, weights, folders[name]) for name, part in model.parts.items()]


def _weights(plan: Plan, source: Source) -> Callable[[str], Tensor]:
    """A weight by its name in the whole model."""
    kept = dict(build_model(plan).named_parameters()) if source.frozen else {}

    def weight(name: str) -> Tensor:
        return source.whole(name, WEIGHT) if name in source.tensors else kept[name].detach()

    return weight


def _component(plan: Plan, name: str, part: nn.Module, weights: Callable[[str], Tensor], to: Path) -> Exported:
    dtype = _DTYPES[plan.training.precision]
    spec = plan.model["components"][name]
    config: dict[str, Any] = {}
    table = ""
    named: Callable[[str], str] = partial(there, part)
    own: Any = getattr(part, "config", None)
    if is_own(part):
        config = {**own.to_dict(), "dtype": _WORDS[dtype]} if own and getattr(part, "alone", True) else {}
    elif twin := twin_of(spec, plan.training.seq_len, _WORDS[dtype]):
        named, config, table = twin.name, twin.config, twin.table
    entries = []
    for key, parameter in part.named_parameters():
        shape = tuple(parameter.shape)
        shape = shape[1:] if key == table else shape
        entries.append(Entry(named(key), dtype, shape, partial(_shaped, weights, f"parts.{name}.{key}", shape)))
    to.mkdir(parents=True, exist_ok=True)
    if config:
        (to / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _write(to, entries)
    return Exported(name, to, config, len(entries))


def _shaped(weights: Callable[[str], Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    return weights(name).reshape(shape)


def _write(to: Path, entries: list[Entry]) -> None:
    files = list(_files(entries))
    if len(files) == 1:
        write(to / "model.safetensors", files[0])
        return
    placed: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write(to / name, file)
        placed |= {entry.name: name for entry in file}
    total = sum(entry.bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(entries: list[Entry]) -> Iterator[list[Entry]]:
    file: list[Entry] = []
    for entry in entries:
        if file and sum(each.bytes for each in file) + entry.bytes > FILE_BYTES:
            yield file
            file = []
        file.append(entry)
    yield file
