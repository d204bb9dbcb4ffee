"""What accelerate and transformers take, by version: `python -m tests.real.trainer_tables FRAMEWORK DIR`.

Prints dslaunch/engines/data/accelerate_options.json or training_arguments.json, for accelerate or transformers.
DIR holds one folder a version, named after it: the unpacked wheel (`pip download --no-deps`). accelerate's options
come from its own parser, run in a process for each version; the Trainer's arguments are read from the class as it
is written.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_ASK = """
import argparse, dataclasses, json
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.dataclasses import DistributedType, DynamoBackend
kinds = {"_StoreTrueAction": "StoreTrue", "_StoreConstAction": "StoreTrue", "_HelpAction": "StoreTrue"}
options = []
for each in launch_command_parser()._actions:
    if each.option_strings:
        row = {"flags": sorted(each.option_strings), "kind": kinds.get(type(each).__name__, "Store")}
        kind = getattr(each.type, "__name__", "").replace("<lambda>", "str_to_bools")
        if kind and kind != "str":
            row["type"] = kind
        if each.choices:
            row["choices"] = list(each.choices)
        options.append(row)
print(json.dumps({
    "options": options,
    "keys": [each.name for each in dataclasses.fields(ClusterConfig)],
    "sagemaker": [each.name for each in dataclasses.fields(SageMakerConfig)],
    "distributed_type": [each.value for each in DistributedType],
    "dynamo_backend": [each.value for each in DynamoBackend],
}))
"""
_SPANNED = ("keys", "sagemaker", "distributed_type", "dynamo_backend")


def main(framework: str, folder: str) -> None:
    versions = sorted((each.name for each in Path(folder).iterdir()), key=_release)
    found = {version: _FACTS[framework](Path(folder, version)) for version in versions}
    table: dict[str, Any] = {"source": _SOURCES[framework], "versions": versions}
    if framework == "accelerate":
        table["arguments"] = spans({version: facts["options"] for version, facts in found.items()})
        for name in _SPANNED:
            rows = {version: [{"name": each} for each in facts[name]] for version, facts in found.items()}
            table[name] = spans(rows)
    else:
        for name in ("arguments", *_ENUMS):
            rows = {version: [{"name": each} for each in facts[name]] for version, facts in found.items()}
            table[name] = spans(rows)
    print(text_of(table))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def accelerate(folder: Path) -> dict[str, Any]:
    """What the parser and the classes of one version hold."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


_MODULES = ("training_args", "training_args_seq2seq", "trainer_utils")
_ENUMS = {
    "strategies": "IntervalStrategy", "save_strategies": "SaveStrategy", "schedulers": "SchedulerType",
    "optimizers": "OptimizerNames", "hub_strategies": "HubStrategy", "fsdp_options": "FSDPOption",
}  # fmt: skip


def transformers(folder: Path) -> dict[str, list[str]]:
    """The fields of TrainingArguments and its Seq2Seq kind, in their order, and the words of its enums."""
    texts = ((folder / "transformers" / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)
    classes = {
        each.name: each for text in texts for each in ast.parse(text).body if isinstance(each, ast.ClassDef)
    }
    found = {name: words_of(classes[kind]) if kind in classes else [] for name, kind in _ENUMS.items()}
    found["save_strategies"] = found["save_strategies"] or found["strategies"]
    fields = (
        each.target for name in ("TrainingArguments", "Seq2SeqTrainingArguments") for each in classes[name].body
        if isinstance(each, ast.AnnAssign)
    )  # fmt: skip
    names = [each.id for each in fields if isinstance(each, ast.Name) and not each.id.startswith("_")]
    return {"arguments": names, **found}


def words_of(enum: ast.ClassDef) -> list[str]:
    """The values of an enum."""
    values = (each.value for each in enum.body if isinstance(each, ast.Assign))
    return [each.value for each in values if isinstance(each, ast.Constant)]


_FACTS = {"accelerate": accelerate, "transformers": transformers}
_SOURCES = {
    "accelerate": "huggingface/accelerate:src/accelerate/commands/launch.py launch_command_parser, "
    "commands/config/config_args.py, utils/dataclasses.py, run",
    "transformers": "huggingface/transformers:src/transformers/training_args.py, training_args_seq2seq.py, "
    "trainer_utils.py",
}


def spans(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each row once, with the first and the last of the versions in a row that have it alike."""
    versions = list(rows)
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        for row in rows[version]:
            before = versions[at - 1] if at else ""
            same = (each for each in found if each["until"] == before and _bare(each) == dict(row))
            open_row = next(same, None)
            if open_row is None:
                found.append({**row, "since": version, "until": version})
            else:
                open_row["until"] = version
    for each in found:
        if each["since"] == versions[0]:
            del each["since"]
        if each["until"] == versions[-1]:
            del each["until"]
    return found


def _bare(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("since", "until")}


def text_of(table: Mapping[str, Any]) -> str:
    """JSON with one row on each line."""
    parts = []
    for name, value in table.items():
        rows = isinstance(value, list) and value and isinstance(value[0], dict)
        inner = ",\n  ".join(json.dumps(each) for each in value) if rows else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n  {inner}\n ]" if rows else json.dumps(value)))
    return "{" + ",\n ".join(parts) + "}"


if __name__ == "__main__":
    main(*sys.argv[1:])
