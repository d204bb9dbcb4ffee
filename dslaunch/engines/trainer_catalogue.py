"""What `accelerate launch`, accelerate's configuration and the Hugging Face Trainer take, by version, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dslaunch.engines.deepspeed_keys import release
from dslaunch.engines.megatron_catalogue import Catalogue, catalogue_of, load_table

Words = Literal["keys", "sagemaker", "distributed_type", "dynamo_backend"]
"""Lists of accelerate's: keys of its configuration (of a cluster's, of SageMaker's), and values of two of them."""

TrainerWords = Literal[
    "arguments", "strategies", "save_strategies", "schedulers", "optimizers", "hub_strategies", "fsdp_options"
]
"""Lists of the Trainer's."""


@dataclass(frozen=True)
class Word:
    """A name that all versions from `since` to `until` have; each is empty where no end is known."""

    name: str
    since: str
    until: str
    next: str
    """The first known version behind `until`."""


@lru_cache(maxsize=1)
def accelerate_versions() -> tuple[str, ...]:
    """The versions of accelerate that were read, oldest first."""
    return tuple(_accelerate()["versions"])


@lru_cache(maxsize=1)
def accelerate_options() -> Catalogue:
    """The options of `accelerate launch`: the newest version's, and under `elsewhere` those of all."""
    newest = accelerate_versions()[-1]
    return catalogue_of(f"accelerate {newest}", newest, _accelerate())


@lru_cache(maxsize=8)
def accelerate_words(kind: Words) -> dict[str, Word]:
    """The words of one list, by name; the newest span where there are several."""
    return _words(_accelerate()[kind], _accelerate()["versions"])


@lru_cache(maxsize=8)
def trainer_words(kind: TrainerWords) -> dict[str, Word]:
    """The words of one list, by name: fields of TrainingArguments and its Seq2Seq kind, or an enum's."""
    table = load_table("training_arguments.json")
    return _words(table[kind], table["versions"])


@lru_cache(maxsize=1)
def _accelerate() -> Any:
    return load_table("accelerate_options.json")


def _words(rows: list[dict[str, str]], versions: list[str]) -> dict[str, Word]:
    made = (
        Word(row["name"], row.get("since", ""), row.get("until", ""), _behind(row.get("until", ""), versions))
        for row in rows
    )
    return {word.name: word for word in sorted(made, key=lambda word: release(word.since or "0"))}


def _behind(version: str, versions: list[str]) -> str:
    return versions[versions.index(version) + 1] if version else ""
