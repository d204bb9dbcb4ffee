"""Which samples a rank gets: nothing shares them out, or in the same order in each epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.objects import assigned
from dslaunch.rules.scripts.tree import Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_DOCS = "PyTorch 2.13 documentation"
_SHARED_DATA = re.compile(
    r"DistributedSampler|BatchSampler|split_dataset_by_node|IterableDataset|webdataset|\bwds\b|StreamingDataset"
    r"|distributed_sampler|get_data_parallel|DataLoader2|shard\(|SequentialDistributed"
    r"|\)\[(?:\w+\.)?(?:\w*rank|proc_id)\]|\[(?:\w+\.)?\w*rank\s*::"
)
"""What samples are shared out by, of a library or by hand: `indices.split(n)[rank]`, `files[rank::n]`."""


_OWN_PART = re.compile(
    r"\brange\([^()]*\brank\b|\[[^\[\]]*\brank\b[^\[\]]*:|%[^=]+==\s*[\w.]*rank\b|(?:index|rank)=[\w.]*rank\b"
)
"""What takes a rank's own part of something: `range(rank, n, size)`, `[rank * k : ...]`, `i % size == rank`."""


@rule("script.sampler", severity="wrong", raised_by="nobody", evidence=f"{_DOCS}: DistributedSampler")
def sampler(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Every rank reads the same samples: a DataLoader that shuffles without DistributedSampler."""
    for script in scripts(files):
        if not script.own_loop or _SHARED_DATA.search(script.python.text):
            continue
        if not _epochs(script) and any("rank" in ast.unparse(each.node) for each in script.methods("manual_seed")):
            continue  # each draws at random, by a seed of its own, for a number of steps
        for call in script.called("torch.utils.data.DataLoader") if not _by_engine(script) else ():
            shuffle = call.keyword("shuffle")
            shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
            if (
                shuffles
                and not call.keyword("sampler")
                and not call.keyword("batch_sampler")
                and not call.unpacks
                and not _is_cut(script, call)
            ):
                message = (
                    "each rank draws from the whole data set by itself: no DistributedSampler shares it out."
                )
                yield script.hit(call, message, "Give sampler=DistributedSampler(dataset), and no shuffle.")


def _is_cut(script: Script, call: Call) -> bool:
    """Whether a script cuts the samples by itself, by the rank or by indices that it was handed: `index[seed]`."""
    given = call.argument("dataset", 0)
    names, held = set[str](), [given] if given is not None else []
    while held:
        node = held.pop()
        if _OWN_PART.search(ast.unparse(node)):
            return True
        found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - names
        names |= found
        held += [value for name in found for value in assigned(script, name)]
    return any(
        isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name) and ast.unparse(value.value) == name
        for name in names for value in assigned(script, name)
    )  # fmt: skip


def _by_engine(script: Script) -> bool:
    """Whether deepspeed.initialize makes the loader that trains, by ranks."""
    for call in script.deepspeed:
        given, around = call.argument("training_data", 4), call.around[0] if call.around else None
        targets = around.targets[0] if isinstance(around, ast.Assign) else None
        loader = targets.elts[2:3] if isinstance(targets, ast.Tuple) else []
        taken = any(isinstance(each, ast.Name) and each.id.strip("_") for each in loader)
        if given is not None and not is_none(given) and taken:
            return True
    return False


@rule(
    "script.set-epoch",
    severity="wrong",
    raised_by="nobody",
    evidence=f"{_DOCS}: DistributedSampler.set_epoch",
)
def set_epoch(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A DistributedSampler without set_epoch: the same order in each epoch."""
    for script in scripts(files):
        if not script.own_loop or script.methods("set_epoch") or not _epochs(script):
            continue
        for call in script.called("torch.utils.data.DistributedSampler"):
            shuffle = call.keyword("shuffle")
            ordered = isinstance(shuffle, ast.Constant) and shuffle.value is False
            if not ordered and not _is_for_evaluation(call):
                message = "set_epoch is never called: DistributedSampler draws the same order in each epoch."
                yield script.hit(call, message, "Call sampler.set_epoch(epoch) at the start of each epoch.")


def _epochs(script: Script) -> bool:
    loops = (node for node in script.nodes if isinstance(node, ast.For))
    return any("epoch" in ast.unparse(loop.target) for loop in loops)


def _is_for_evaluation(call: Call) -> bool:
    around = next((node for node in call.around if isinstance(node, ast.Assign)), None)
    text = ast.unparse(around).lower() if around else ast.unparse(call.node).lower()
    return re.search(r"val|test|eval|dev_", text) is not None
