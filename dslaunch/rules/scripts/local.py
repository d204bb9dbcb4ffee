"""Numbers of one node where those of all nodes are meant: which samples a rank reads, and who it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.scripts.tree import INIT, Script, scripts
from dslaunch.rules.settings import Settings

_ASKED = {"torch.utils.data.DistributedSampler": ("num_replicas", "rank"), INIT: ("world_size", "rank")}
"""Arguments that are numbers among all ranks; each is given by its name."""
_RANK = re.compile(r"\bLOCAL_RANK\b|\bSLURM_LOCALID\b|\blocal_rank\b")
_COUNT = re.compile(r"\bdevice_count\(\)|\bLOCAL_WORLD_SIZE\b|\bSLURM_GPUS_ON_NODE\b|\blocal_world_size\b")


@rule(
    "script.local-number", severity="wrong", raised_by="nobody",
    evidence="PyTorch 2.13 documentation: DistributedSampler, init_process_group",
)  # fmt: skip
def local_number(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A rank or a number of processes of one node as one among all, in a run of several nodes."""
    nodes = settings.nodes or 1
    for script in scripts(files) if nodes > 1 else ():
        for name, arguments in _ASKED.items():
            for call in script.called(name):
                odd = [each for each in arguments if _is_local(script, call.keyword(each))]
                if not odd:
                    continue
                effect, severity = _effect(name, nodes)
                message = f"{' and '.join(odd)} of one node, in a run of {nodes}: {effect}."
                fix = 'Leave them out, or take int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"]).'
                yield replace(script.hit(call, message, fix), severity=severity)


def _effect(name: str, nodes: int) -> tuple[str, Severity]:
    if name == INIT:
        return "several processes take themselves for the same rank, and wait for others that never come", "hang"
    return f"every node reads the same samples, {nodes} times in each epoch", "wrong"


def _is_local(script: Script, given: ast.expr | None) -> bool:
    """Whether it is a number of one node, by itself: `node * 8 + local_rank` is none."""
    node = script.bound(given)
    if node is None or any(isinstance(each, ast.BinOp | ast.IfExp | ast.BoolOp) for each in ast.walk(node)):
        return False
    text = ast.unparse(node)
    return bool(_RANK.search(text) or _COUNT.search(text))
