"""What every recipe becomes on every engine and version: files, or the first words of the reason against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from dslaunch.compose import names
from dslaunch.engines.registry import ENGINES
from dslaunch.errors import ConfigError, PlanError
from dslaunch.flow import refusing
from dslaunch.paths import data_dirs
from dslaunch.plan.planner import plan
from dslaunch.planfile import Plan
from dslaunch.render import render
from dslaunch.rules.checking import check_rendered
from dslaunch.schema.config import RunConfig
from tests.golden.cases import planned

RECIPES = names("recipes")
WORDS = ["engine.path=/opt/framework", "data.path=/data/text", "data.tokenizer=/models/tokenizer"]
OWN_PROGRAM = ("native", "megatron", "megatron_deepspeed")
"""Engines that run a program of their framework's or of ours; the others run a script of the user's."""
OWN_CODE = {
    "deepspeed": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "native": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "megatron_deepspeed": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "torch": ("2.13",),
    "megatron": ("0.16.0", "0.14.0", "0.12.0"),
    "megatron_mimo": (),
}
"""Versions whose own code reads the files in these tests; of the others only the table of keys or arguments does."""
HEADER = """\
# Recipes, engines and versions

Each recipe, as it stands, was rendered for each engine and each of its versions, and read there. This page is made
by tests/real/test_support.py (`pytest --update-golden`), which fails where it is out of date.

- *by its own code*: the framework itself read the files. DeepSpeed: `DeepSpeedConfig` for the plan's number of
  replicas, and for its newest version `deepspeed.initialize` where nothing is offloaded. Megatron-LM:
  megatron-core's `TransformerConfig`, its layers by stage and its groups of ranks, besides the catalogue. PyTorch:
  accelerate's loader.
- *by its table alone*: the keys (DeepSpeed) or arguments (Megatron-LM, Megatron-DeepSpeed) of that version, as data
  read from its source. Megatron-DeepSpeed's arguments are read so in every case, beside its DeepSpeed JSON.
- *refused*: the first words of the reason. Another strategy, layout or cluster of the same recipe may be taken.
"""


@dataclass(frozen=True)
class Attempt:
    """One recipe on one engine and version."""

    recipe: str
    engine: str
    version: str
    refusal: str
    """The first words of the reason; empty where it was rendered."""
    plan: Plan | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@cache
def attempt(recipe: str, engine: str, version: str) -> Attempt:
    """The recipe's files for that engine; what is rendered holds before the rules, as on the command line."""
    config = _configured(recipe)
    changes: dict[str, object] = {
        "engine": config.engine.model_copy(update={"name": engine, "version": version}),
        "script": "" if engine in OWN_PROGRAM or config.module else "train.py",
    }
    config = config.model_copy(update=changes)
    try:
        made, prediction = plan(config)
        if stopping := refusing(prediction.findings, ()):
            return Attempt(recipe, engine, version, stopping[0].message.split(":")[0])
        files = render(made, prediction, config, data_dirs("templates"))
    except (ConfigError, PlanError) as error:
        return Attempt(recipe, engine, version, _first_words(str(error), engine))
    errors = [finding for finding in check_rendered(made, files) if finding.severity in ("error", "wrong")]
    assert not errors, (recipe, engine, version, errors)
    return Attempt(recipe, engine, version, "", made, files)


@cache
def _configured(recipe: str) -> RunConfig:
    return planned(f"recipe={recipe}", *WORDS)[2]


def _first_words(message: str, engine: str, most: int = 12) -> str:
    words = message.splitlines()[0].removeprefix(f"engine {engine}: ").split()
    return " ".join(words[:most]).rstrip(";:,") + (" ..." if len(words) > most else "")


def rendered_for(*engines: str, versions: Mapping[str, Iterable[str]] | None = None) -> list[Attempt]:
    """Every recipe that the engines take, at their default version or at those named."""
    found = []
    for engine in engines:
        for version in (versions or {}).get(engine, ENGINES[engine].versions[:1]):
            found += [attempt(recipe, engine, version) for recipe in RECIPES]
    return [each for each in found if not each.refusal]


def page() -> str:
    """docs/support.md: a table for each engine."""
    return "\n".join([HEADER, *(_table(engine) for engine in ENGINES)])


def _table(engine: str) -> str:
    lines = [
        f"## {engine}\n",
        "| recipe | by its own code | by its table alone | refused |",
        "|---|---|---|---|",
        *(_row(recipe, engine) for recipe in RECIPES),
    ]
    return "\n".join(lines) + "\n"


def _row(recipe: str, engine: str) -> str:
    every = sorted(ENGINES[engine].versions, key=_release)
    attempts = [attempt(recipe, engine, version) for version in every]
    taken = [each.version for each in attempts if not each.refusal]
    own = [version for version in taken if version in OWN_CODE[engine]]
    table = [version for version in taken if version not in own]
    refusals = dict.fromkeys(each.refusal for each in attempts if each.refusal)
    refused = "; ".join(
        reason if not taken else f"{_spans([a.version for a in attempts if a.refusal == reason], every)}: {reason}"
        for reason in refusals
    )
    return f"| {recipe} | {', '.join(own) or '-'} | {_spans(table, every) or '-'} | {refused} |"


def _spans(chosen: list[str], every: list[str]) -> str:
    """`0.17.0 to 0.18.2, 0.19.1`: neighbours in `every` as one span."""
    spans: list[list[str]] = []
    for version in every:
        if version not in chosen:
            continue
        follows = spans and every.index(spans[-1][-1]) + 1 == every.index(version)
        spans[-1].append(version) if follows else spans.append([version])
    return ", ".join(span[0] if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
