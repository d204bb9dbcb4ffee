"""What a user may type: a recipe, a cluster, a strategy and settings drawn at random, from a seed.

Four in five are careful: each word goes with the ones beside it, as far as a user would know. The others are
careless, and some have a slip of the fingers in them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from dslaunch.compose import compose
from dslaunch.conffiles import names
from dslaunch.engines.registry import ENGINES
from tests.real.drawn_words import PARTS, Given, mistake, program

RECIPES = names("recipes")
PRETRAINED = ("llama3_70b", "llama3_405b", "gpt3_175b", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3")
"""Recipes with layouts for Megatron."""
STRATEGIES = names("strategy")
GPUS = [name for name in names("cluster") if name != "local"]
USUAL = ("A100", "H100", "H100", "H200", "B200", "GB200", "MI300X")
SIZES = (1, 2, 4, 8, 8, 8, 16, 16, 32, 32, 64, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ODD_SIZES = (3, 6, 12, 24, 40, 48, 72, 96, 100, 192, 384, 576, 1000, 3072)


@dataclass(frozen=True)
class Drawn:
    """One command line, and whether a word of it was mistaken on purpose."""

    number: int
    words: tuple[str, ...]
    mistaken: bool

    @property
    def text(self) -> str:
        return " ".join(self.words)


def drawn(number: int, first_seed: int = 0) -> Drawn:
    """The command line of that number: the same for the same seed."""
    dice = random.Random(f"{first_seed}/{number}")
    recipe, careless = dice.choice(PRETRAINED if dice.random() < 0.3 else RECIPES), dice.random() < 0.2
    tree = _tree(recipe)
    components = tree["model"]["components"]
    strategy = _strategy(dice, recipe)
    gpu, world = _cluster(dice, tree, strategy, careless)
    node = _node(gpu) if gpu else 2
    plain = len(components) == 1 and not any(part.get("lora") for part in components.values())
    engine = _engine(dice, strategy, plain or careless, recipe == "vla_tiny" or careless)
    given = Given(
        dice, recipe, world, node, strategy, engine, components, tree["training"], careless
    )  # fmt: skip
    words = [f"recipe={recipe}", _sized(given, gpu)]
    words += [f"strategy={strategy}"] if strategy else []
    words += [f"engine={engine}"] if engine != "auto" else []
    words += program(given)
    for part in PARTS:
        words += part(given)
    mistaken = given.chance(0.08)
    if mistaken:
        words.append(mistake(given))
    return Drawn(number, tuple(words), mistaken)


@cache
def _tree(recipe: str) -> dict[str, Any]:
    return compose(recipe, []).tree


@cache
def _node(gpu: str) -> int:
    return int(compose("vla_tiny", [f"cluster={gpu}"]).tree["cluster"]["node"]["gpus"])


def _cluster(dice: random.Random, tree: dict[str, Any], strategy: str, careless: bool) -> tuple[str, int]:
    """A GPU (empty: this machine) and how many: about as many as the recipe's own, or any number."""
    if dice.random() < 0.04:
        return "", 2
    gpu = dice.choice(USUAL) if dice.random() < 0.7 else dice.choice(GPUS)
    experts = any(part.get("experts") for part in tree["model"]["components"].values())
    most = 128 if strategy == "auto" and experts else 16384  # a search of more takes a minute
    if careless:
        return gpu, min(most, dice.choice(SIZES if dice.random() < 0.6 else ODD_SIZES))
    if strategy in ("", "layouts") and tree.get("layouts"):
        return gpu, int(dice.choice(list(tree["layouts"])))
    own = int(tree["cluster"].get("gpus") or tree["cluster"]["node"]["gpus"])
    return gpu, min(
        most, max(1, own * dice.choice((1, 1, 1, 1, 2, 2, 4, 8, 32)) // dice.choice((1, 1, 1, 2)))
    )


def _strategy(dice: random.Random, recipe: str) -> str:
    """Empty: the recipe's own."""
    if dice.random() < (0.55 if recipe in PRETRAINED else 0.2):
        return ""
    return "auto" if dice.random() < 0.3 else dice.choice(STRATEGIES)


def _engine(dice: random.Random, strategy: str, decoder: bool, own: bool) -> str:
    """One that takes the strategy, most of the time.

    Args:
        decoder: the model is a language model alone, trained in full, which is what Megatron's scripts train.
        own: dslaunch.runtime has modules for the model.
    """
    if dice.random() < 0.05:
        return dice.choice(list(ENGINES))
    if strategy in ("autotp", "ulysses", "zenflow", "super_offload") or dice.random() < 0.3:
        return "deepspeed" if strategy.startswith(("autotp", "uly", "zen", "super", "zero")) else "auto"
    if strategy in ("ddp", "fsdp2", "hsdp"):
        return "torch"
    if strategy in ("auto", "", "layouts"):
        return dice.choice(["megatron", "megatron", "megatron_deepspeed"]) if decoder else "auto"
    if strategy in ("zero1", "zero0") and decoder:
        return dice.choice(["megatron", "deepspeed", "megatron_deepspeed"])
    return dice.choice(["deepspeed", "native"]) if own else "deepspeed"


def _sized(given: Given, gpu: str) -> str:
    if not gpu:
        return "cluster=local"
    if given.chance(0.12) and given.world >= 16:
        per = given.one(*(size for size in (2, 4, 8) if size <= given.node))
        return f"cluster={given.world // per}x{per}x{gpu}"
    return f"cluster={given.world}x{gpu}"
