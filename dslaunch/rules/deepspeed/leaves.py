"""Leaf modules of ZeRO-3 that a DeepSpeed JSON names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit
from dslaunch.rules.scripts.tree import scripts

_LEAF = f"{ZERO}.leaf_module"
_WHOLE = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:For[A-Z]\w+|LMHeadModel)")
"""Classes of transformers that are a whole model with its head."""
_EMBEDDING = ("Embedding", "torch.nn.modules.sparse.Embedding")
_INNER = re.compile(r"\binputs_embeds\b")
"""What a language model within a larger one is given, which may need gradients."""
_FREEZES = re.compile(r"requires_grad|\bpeft\b|\bfreeze\w*\b", re.IGNORECASE)


@config_rule(
    "zero.leaf-input", severity="error", raised_by="deepspeed.initialize", since="0.18.0",
    evidence="deepspeed/runtime/zero/stage3.py create_reduce_and_remove_grad_hooks 0.19.8, run; torch 2.13",
)  # fmt: skip
def leaf_input(config: Config) -> Iterator[Hit]:
    """A leaf module whose input needs no gradient: the model itself, or an embedding that trains."""
    if config.stage != 3 or config.stages > 1:
        return
    for key, what in (("classes", _of_class(config)), ("names", _of_name(config))):
        if what:
            message = (
                f"{what}, whose input needs no gradient: torch calls the leaf's hook before its gradients are "
                "there, DeepSpeed takes the weights away, and the backward pass raises RuntimeError."
            )
            yield config.hit(f"{_LEAF}.{key}", message, "Name a module inside, such as the layer of experts.")


def _of_class(config: Config) -> str:
    """What is wrong with the classes, in words; empty where nothing is known to be."""
    given = config.get(f"{_LEAF}.classes")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    texts = [name for name in names if isinstance(name, str)]
    whole = next((name for name in texts if _WHOLE.fullmatch(name)), "")
    if whole and not _any_says(config, _INNER):
        return f"{whole} is a whole model"
    embedding = next((name for name in texts if name in _EMBEDDING), "")
    return f"{embedding} takes the tokens themselves" if embedding and not _any_says(config, _FREEZES) else ""


def _of_name(config: Config) -> str:
    given = config.get(f"{_LEAF}.names")
    return "'' is the name of the model itself" if given == "" or (isinstance(given, list) and "" in given) else ""


def _any_says(config: Config, words: re.Pattern[str]) -> bool:
    """Whether a script beside the file has one of the words."""
    return config.files is not None and any(words.search(each.python.text) for each in scripts(config.files))
