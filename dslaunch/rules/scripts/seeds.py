"""Orders and splits of samples that are drawn by chance, and whether all ranks draw them alike."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from dslaunch.rules.scripts.guards import one_rank_guard
from dslaunch.rules.scripts.tree import Call, Script, is_none

Library = Literal["numpy", "random", "torch"]
_OF_LIBRARY: Mapping[Library, frozenset[str]] = {
    "numpy": frozenset({"numpy.random.seed"}),
    "random": frozenset({"random.seed"}),
    "torch": frozenset({"torch.manual_seed", "torch.random.manual_seed", "torch.seed"}),
}
"""What the global generator of each goes by."""
_OF_ALL = frozenset({
    "accelerate.utils.set_seed", "accelerate.utils.random.set_seed", "transformers.set_seed",
    "transformers.trainer_utils.set_seed",
})  # fmt: skip
"""What seeds all of them."""
_EVERY = frozenset[str]().union(*_OF_LIBRARY.values())
_OTHERS = re.compile(r"torch\.(?:cuda|xpu|npu|mps|get_rng)\b.*|.*\.initial_seed|.*\bmanual_seed")
"""Seeds of devices and of generators of their own, which no such draw goes by."""
_TAKE_A_SEED = re.compile(
    r"(?:.*\.)?(?:DistributedSampler|Generator|TrainingArguments|\w+Config|random_split|shuffle|train_test_split"
    r"|default_rng|RandomState|Random|PCG64|KFold|StratifiedKFold|add_argument)"
)
"""What keeps a seed to itself."""
_RANK = re.compile(r"\b(?:local_|global_)?rank\b|get_rank\(|process_index|\bRANK\b|LOCAL_RANK")
_SETS_UP = re.compile(r"(?i)init|set_?up|seed|prepare|config|launch|start|boot|determin|reproduc|random|env")
_SHARES = re.compile(r"broadcast|scatter_object")
"""By what all ranks get the order that one of them draws."""
_LIBRARIES = frozenset({
    "accelerate", "apex", "datasets", "deepspeed", "einops", "huggingface_hub", "numpy", "pandas", "peft", "PIL",
    "scipy", "sklearn", "tokenizers", "torch", "torchvision", "tqdm", "transformers", "trl", "wandb", "yaml",
}) | sys.stdlib_module_names  # fmt: skip
"""Modules of which it is known that none seeds without being asked to."""


@dataclass(frozen=True)
class Draw:
    """A call that puts samples in an order by chance, or splits them."""

    call: Call
    library: Library
    fix: str
    target: ast.expr | None = None
    """What is shuffled in its place; None where the call returns it."""


_ALIKE = "Seed {0} with the same number on all ranks above it, or broadcast what one rank draws."
_IN_PLACE: Mapping[str, Library] = {"random.shuffle": "random", "numpy.random.shuffle": "numpy"}
_RETURNED: Mapping[str, tuple[Library, tuple[str, ...], str]] = {
    "numpy.random.permutation": ("numpy", (), _ALIKE.format("numpy")),
    "sklearn.model_selection.train_test_split": ("numpy", ("random_state",), "Give random_state=0."),
    "sklearn.utils.shuffle": ("numpy", ("random_state",), "Give random_state=0."),
    "torch.randperm": ("torch", ("generator",), "Give generator=torch.Generator().manual_seed(0)."),
}
"""The generator that each draws by, and the argument that gives it another."""


def draw_of(script: Script, call: Call) -> Draw | None:
    """What a call draws by a global generator; None where it draws nothing, or by one of its own."""
    if call.unpacks:
        return None
    library = _IN_PLACE.get(call.name)
    if library is not None:
        fix = _ALIKE.format(library)
        return Draw(call, library, fix, call.node.args[0]) if len(call.node.args) == 1 else None
    if call.name in _RETURNED:
        library, other, fix = _RETURNED[call.name]
        return Draw(call, library, fix) if not _given(call, *other) and not _in_order(script, call) else None
    method = call.node.func.attr if isinstance(call.node.func, ast.Attribute) else ""
    if method == "sample" and call.keyword("frac") is not None and not _given(call, "random_state"):
        return Draw(call, "numpy", "Give random_state=0.")
    of_datasets = any(full.partition(".")[0] == "datasets" for full in script.imports.values())
    if of_datasets and _is_of_datasets(call, method) and not _given(call, "seed", "generator"):
        return Draw(call, "numpy", "Give seed=0.") if not _in_order(script, call) else None
    return None


def _is_of_datasets(call: Call, method: str) -> bool:
    """`data.shuffle()`, or `data.train_test_split(test_size=0.1)`, of Hugging Face's datasets."""
    if method == "train_test_split":
        return len(call.node.args) < 2
    return method == "shuffle" and not call.node.args


def _given(call: Call, *names: str) -> bool:
    values = (call.keyword(name) for name in names)
    return any(each is not None and not is_none(each) for each in values)


def _in_order(script: Script, call: Call) -> bool:
    """Whether a split keeps the order, or may."""
    given = call.keyword("shuffle")
    return given is not None and script.constant(given) is not True


def why_unlike(script: Script, call: Call, library: Library, every: Sequence[Script]) -> str:
    """Why ranks draw differently, in words; empty where they may not.

    Args:
        every: all scripts; one that starts this one may seed first.
    """
    if one_rank_guard(call) is not None or _is_shared(script, call.function or script.python.tree):
        return ""
    seeds: dict[Library, tuple[list[Call], bool]] = vars(script).setdefault("seeds_of", {})
    if library not in seeds:
        seeds[library] = _seeds(script, library)
    own, unknown = seeds[library]
    if not own:
        if "seeded_elsewhere" not in vars(script):
            vars(script)["seeded_elsewhere"] = _may_seed_elsewhere(script) or not _is_started(script, every)
        return "" if unknown or vars(script)["seeded_elsewhere"] else f"nothing seeds {library}"
    above = [each for each in own if each.function is call.function and each.node.lineno < call.node.lineno]
    if not above or unknown or not _is_by_rank(script, above[-1]):
        return ""
    return f"line {above[-1].node.lineno} seeds {library} by the rank"


def _is_shared(script: Script, scope: ast.AST) -> bool:
    """Whether one rank's order goes to all in a function; kept, as its text is long."""
    kept: dict[ast.AST, bool] = vars(script).setdefault("broadcasts", {})
    if scope not in kept:
        kept[scope] = _SHARES.search(ast.unparse(scope)) is not None
    return kept[scope]


def _is_by_rank(script: Script, seed: Call) -> bool:
    by_device = script.constant(seed.keyword("device_specific")) is True
    return by_device or any(_RANK.search(ast.unparse(each)) for each in seed.node.args)


def _seeds(script: Script, library: Library) -> tuple[list[Call], bool]:
    """The calls that seed a library, those of the file's own functions too; and whether others may."""
    own: list[Call] = []
    unknown = False
    seeding = {
        call.function.name for call in script.calls
        if call.function is not None and call.name in _OF_LIBRARY[library] | _OF_ALL
    }  # fmt: skip
    for call in script.every:
        if call.name in _OF_LIBRARY[library] | _OF_ALL or call.name in seeding:
            own.append(call)
        elif call.name in script.functions or _OTHERS.fullmatch(call.name):
            continue
        elif "seed" in call.method.lower():
            unknown = unknown or call.name not in _EVERY
        elif not _TAKE_A_SEED.fullmatch(call.name):
            given = (*call.node.args, *(each.value for each in call.node.keywords))
            unknown |= any("seed" in (each.arg or "") for each in call.node.keywords)
            unknown |= any(isinstance(each, ast.Name | ast.Attribute) and _is_seed(each) for each in given)
    return own, unknown


def _is_seed(node: ast.Name | ast.Attribute) -> bool:
    return "seed" in (node.id if isinstance(node, ast.Name) else node.attr).lower()


def _is_started(script: Script, every: Sequence[Script]) -> bool:
    """Whether it runs by itself: it sets ranks up or has a main guard, and no file that seeds imports it."""
    sets_up = script.own_loop or bool(script.accelerators) or "__main__" in script.python.text
    name = PurePosixPath(script.path).stem
    seeding = (each for each in every if each is not script and "seed" in each.python.text)
    return sets_up and not any(name in full.split(".") for each in seeding for full in each.imports.values())


def _may_seed_elsewhere(script: Script) -> bool:
    """Whether a function of another module is called that may seed, going by its name."""
    relative = {
        alias.asname or alias.name for node in script.nodes if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }  # fmt: skip
    others = relative | {full.partition(".")[0] for full in script.imports.values()} - _LIBRARIES
    return any(call.name.partition(".")[0] in others and _SETS_UP.search(call.method) for call in script.calls)
