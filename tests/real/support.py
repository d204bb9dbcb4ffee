"""What every recipe becomes on every engine and version: files, or the first words of the reason against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from dslaunch.compose import compose
from dslaunch.conffiles import names
from dslaunch.engines.registry import ENGINES
from dslaunch.errors import ConfigError, PlanError
from dslaunch.flow import refusing
from dslaunch.paths import data_dirs
from dslaunch.plan.planner import plan
from dslaunch.planfile import Plan
from dslaunch.render import render
from dslaunch.rules.checking import check_rendered
from dslaunch.schema.config import RunConfig
from dslaunch.schema.validate import validate

RECIPES = names("recipes")
WORDS = ["engine.path=/opt/framework", "data.path=/data/text", "data.tokenizer=/models/tokenizer"]
OWN_PROGRAM = ("native", "megatron", "megatron_deepspeed")
"""Engines that run a program of their framework's or of ours; the others run a script of the user's."""
STRATEGY = {"deepspeed": "zero3", "torch": "fsdp2", "megatron": "auto", "megatron_deepspeed": "zero3"}
"""What is tried where a recipe's own strategy is for other engines."""
OWN_CODE = {
    "deepspeed": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "native": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "megatron_deepspeed": ("0.19.8", "0.18.9", "0.17.6", "0.16.9"),
    "torch": ("2.13",),
    "megatron": ("0.16.0", "0.14.0", "0.12.0"),
    "megatron_mimo": (),
}
"""Versions whose own code reads the files in these tests; for the others their table of keys or arguments does."""
HEADER = """\
# Recipes, engines and versions

Each recipe, as it stands, was rendered for each engine and each of its versions, and read there. This page is made
by tests/real/test_support.py (`pytest --update-golden`), which fails where it is out of date.

- *by its own code*: the framework itself read the files. DeepSpeed: `DeepSpeedConfig` for the plan's number of
  replicas, and with the newest version `deepspeed.initialize` for one recipe of each ZeRO stage and schedule.
  Megatron-LM: megatron-core's `TransformerConfig`, its layers by stage and its groups of ranks, besides the
  catalogue. PyTorch: accelerate's loader.
- *by its table alone*: the keys (DeepSpeed) or arguments (Megatron-LM, Megatron-DeepSpeed) of that version, as
  data read from its source. Megatron-DeepSpeed's arguments are always read so, beside its DeepSpeed JSON.
- *strategy*: what was tried where the recipe's own strategy is for other engines; `-` is the recipe's own.
- *refused*: the first words of the reason. Another layout or cluster of the same recipe may be taken.
"""


@dataclass(frozen=True)
class Attempt:
    """One recipe on one engine and version."""

    recipe: str
    strategy: str
    """Another than the recipe's own; empty where it is tried as it stands."""
    engine: str
    version: str
    refusal: str
    """The first words of the reason; empty where it was rendered."""
    plan: Plan | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@cache
def attempt(recipe: str, strategy: str, engine: str, version: str) -> Attempt:
    """The recipe's files for that engine; what is rendered holds before the rules, as on the command line."""
    tried = (recipe, strategy, engine, version)
    try:
        config = _configured(recipe, strategy, engine, version)
        made, prediction = plan(config)
        if stopping := refusing(prediction.findings, ()):
            return Attempt(*tried, stopping[0].message.split(":")[0])
        files = render(made, prediction, config, data_dirs("templates"))
    except (ConfigError, PlanError) as error:
        return Attempt(*tried, _first_words(str(error), engine))
    errors = [finding for finding in check_rendered(made, files) if finding.severity in ("error", "wrong")]
    assert not errors, (*tried, errors)
    return Attempt(*tried, "", made, files)


def _configured(recipe: str, strategy: str, engine: str, version: str) -> RunConfig:
    config = _composed(recipe, strategy)
    changes: dict[str, object] = {
        "engine": config.engine.model_copy(update={"name": engine, "version": version}),
        "script": "" if engine in OWN_PROGRAM else "train.py",
        "module": "",
    }
    return config.model_copy(update=changes)


@cache
def _composed(recipe: str, strategy: str) -> RunConfig:
    composed = compose(recipe, [*WORDS, *([f"strategy={strategy}"] if strategy else [])])
    return validate(composed.tree, composed.locate)


@cache
def strategy_for(recipe: str, engine: str) -> str:
    """The engine's of STRATEGY where its default version takes that, but not the recipe's own; else empty."""
    default, other = ENGINES[engine].versions[0], STRATEGY.get(engine, "")
    if not attempt(recipe, "", engine, default).refusal:
        return ""
    return other if other and not attempt(recipe, other, engine, default).refusal else ""


def taken(*engines: str, version: str = "") -> list[Attempt]:
    """Every recipe that the engines take, at `version` or at each engine's default."""
    tried = [
        attempt(recipe, strategy_for(recipe, engine), engine, version or ENGINES[engine].versions[0])
        for engine in engines
        for recipe in RECIPES
    ]
    return [each for each in tried if not each.refusal]


def _first_words(message: str, engine: str, most: int = 12) -> str:
    words = message.splitlines()[0].removeprefix(f"engine {engine}: ").split()
    return " ".join(words[:most]).rstrip(";:,") + (" ..." if len(words) > most else "")


def page() -> str:
    """docs/support.md: a table for each engine."""
    return "\n".join([HEADER, *(_table(engine) for engine in ENGINES)])


def _table(engine: str) -> str:
    lines = [
        f"## {engine}\n",
        "| recipe | strategy | by its own code | by its table alone | refused |",
        "|---|---|---|---|---|",
        *(_row(recipe, engine) for recipe in RECIPES),
    ]
    return "\n".join(lines) + "\n"


def _row(recipe: str, engine: str) -> str:
    versions = sorted(ENGINES[engine].versions, key=_release)
    strategy = strategy_for(recipe, engine)
    every = [attempt(recipe, strategy, engine, version) for version in versions]
    accepted = [each.version for each in every if not each.refusal]
    own = [version for version in accepted if version in OWN_CODE[engine]]
    table = [version for version in accepted if version not in own]
    whole = len(accepted) == len(versions) and len(own) > 0 < len(table)
    cells = [recipe, strategy, ", ".join(own), "all others" if whole else _spans(table, versions), _refused(every)]
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def _refused(every: Sequence[Attempt]) -> str:
    """The reasons, each with its versions where others are taken or refused for another one."""
    reasons = dict.fromkeys(each.refusal for each in every)
    spans = {
        reason: _spans([each.version for each in every if each.refusal == reason], [e.version for e in every])
        for reason in reasons
        if reason
    }
    return "; ".join(reason if len(reasons) == 1 else f"{s}: {reason}" for reason, s in spans.items())


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
