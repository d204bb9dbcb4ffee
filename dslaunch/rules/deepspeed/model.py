"""The model of a job, as far as it is told: by a Hugging Face config.json, the plan, or the script's class."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import Config
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.topology import component

_TABLE = Path(__file__).with_name("transformers_models.json")
PLAN = "the plan"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_MODEL = re.compile(r"For[A-Z]|AutoModel|LMHeadModel")
"""Classes that a script may train."""
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class Known:
    """What DeepSpeed makes of one model type of transformers, with the defaults of its configuration."""

    name: str
    autotp: str
    """How AutoTP cuts it without a partition_config: `plan`, `names` (of its layers), or `refused`."""
    classes: frozenset[str]
    """The classes of its modules."""
    heads: bool | None
    """Whether per_head_muon finds attention projections; None where that isn't known."""
    hybrid: bool
    """Whether the hybrid engine has a fast layer for it."""


@dataclass(frozen=True)
class Model:
    """What is known of one model."""

    source: str
    """Who says so: a file's name, or PLAN."""
    types: tuple[str, ...]
    """Hugging Face's model_type, then those of its parts; empty where nothing names one."""
    shapes: tuple[Mapping[str, Any], ...]
    """The configuration, then those of its parts, or the plan's components; empty where only a class is known."""

    @property
    def alone(self) -> Known | None:
        """The row of a model without parts of other types; None where the table has none."""
        return known_models().get(self.types[0]) if len(self.types) == 1 else None

    @property
    def parts(self) -> tuple[Known, ...]:
        """The rows of the model and its parts; empty where the table lacks one."""
        rows = [known_models().get(name) for name in self.types]
        found = tuple(row for row in rows if row is not None)
        return found if len(found) == len(rows) else ()

    def number(self, key: str) -> int:
        """A size of the model's own configuration; 0 where it isn't told."""
        return _number(self.shapes[0], key) if self.shapes else 0

    @property
    def hidden(self) -> tuple[int, ...]:
        """The widths of its residual streams."""
        widths = (_number(shape, "hidden", *_HIDDEN) for shape in self.shapes)
        return tuple(sorted({width for width in widths if width}))

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer: 0 of a dense model, None where that isn't known."""
        found = max((_experts(shape) for shape in self.shapes), default=0)
        if found:
            return found
        keys = [key for shape in self.shapes for key, value in shape.items() if value]
        dense = self.source == PLAN or bool(self.shapes and self.parts)
        return 0 if dense and not any("expert" in key or "moe" in key for key in keys) else None

    def said(self) -> str:
        """`config.json says bart`."""
        return f"{self.source} says {self.types[0]}" if self.types else f"by {self.source}"


def model_of(config: Config, files: FileSet) -> Model | None:
    """The model that a DeepSpeed JSON is for; None where nothing tells, or more than one is told of."""
    if config.plan is not None:
        return _of_plan(config.plan, config.file)
    return model_in(files)


def model_in(files: FileSet) -> Model | None:
    """The model that the files tell of; None where none does, or more than one."""
    found = [_of_config(file) for file in files.of("hf_model") if isinstance(file.value, dict)]
    found = found or list(_of_scripts(files))
    return found[0] if len(found) == 1 else None


@cache
def known_models() -> Mapping[str, Known]:
    """Every model type of the table: made by tests/real/transformers_models.py."""
    rows = json.loads(_TABLE.read_text(encoding="utf-8"))["models"]
    return {
        name: Known(name, row["autotp"], frozenset(row["classes"]), row["heads"], row["hybrid"])
        for name, row in rows.items()
    }


@cache
def types_of_classes() -> Mapping[str, str]:
    """The model type of each class that a script may train, such as LlamaForCausalLM."""
    rows = json.loads(_TABLE.read_text(encoding="utf-8"))["models"]
    named_alike = sorted(rows, key=lambda name: rows[name]["class"].lower().startswith(name.replace("_", "")))
    return {rows[name]["class"]: name for name in named_alike}


def _of_plan(plan: Plan, file: File) -> Model | None:
    """The component that the file is of, or all of them where the engine takes the model whole."""
    components = plan.model.get("components", {})
    one = component(plan, file)
    shapes = tuple(shape for name, shape in components.items() if shape and (one is None or one[0] == name))
    return Model(PLAN, (), shapes) if shapes else None


def _of_config(file: File) -> Model:
    shapes = [file.value, *(part for part in file.value.values() if isinstance(part, dict))]
    names = [shape["model_type"] for shape in shapes if isinstance(shape.get("model_type"), str)]
    return Model(file.name.rpartition("/")[2], tuple(dict.fromkeys(names)), tuple(shapes))


def _of_scripts(files: FileSet) -> Iterator[Model]:
    """A class of transformers that a script loads; nothing where it loads others too."""
    for script in scripts(files):
        loaded = [call.owner for call in script.methods("from_pretrained", "from_config", "_from_config")]
        models = {name for name in loaded if _MODEL.search(name.rpartition(".")[2])}
        ours = {name for name in models if name.startswith("transformers.")}
        names = {types_of_classes().get(name.rpartition(".")[2]) if name in ours else None for name in models}
        if len(names) == 1 and (name := names.pop()):
            yield Model(script.path.rpartition("/")[2], (name,), ())


def _experts(shape: Mapping[str, Any]) -> int:
    experts = shape.get("experts")
    if isinstance(experts, dict):
        return int(experts.get("count", 0))
    return _number(shape, *_EXPERTS)


def _number(shape: Mapping[str, Any], *names: str) -> int:
    """The first of these that holds a positive whole number; 0 where none does."""
    values = (shape.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
