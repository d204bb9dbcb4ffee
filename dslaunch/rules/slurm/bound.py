"""Tasks to which SLURM shows one GPU each, and scripts that choose theirs by number all the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs

_BINDS = re.compile(r"--gpus-per-task[= ](?:\w+:)?1\b|--gpu-bind[= ](?:single:1|per_task:1|map_gpu)\b")
_UNBOUND = re.compile(r"--gpu-bind[= ]none|CUDA_VISIBLE_DEVICES=")
_CHOSEN = re.compile(r"LOCAL_RANK|SLURM_LOCALID|local_rank|OMPI_COMM_WORLD_LOCAL_RANK")
_ANYWAY = re.compile(r"device_count\(\)|CUDA_VISIBLE_DEVICES")
"""A script that counts the GPUs that it sees."""


@rule(
    "slurm.one-gpu-each", severity="error", raised_by="torch",
    evidence="SLURM 22.05, run: CUDA_VISIBLE_DEVICES of each task; torch 2.13 cuda.set_device",
)  # fmt: skip
def one_each(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """set_device(LOCAL_RANK) in tasks that see one GPU, whose number is 0: all but the first raise."""
    for job in jobs(files):
        bound = _BINDS.search(job.file.text)
        if bound is None or job.tasks_per_node in (None, 1) or _UNBOUND.search(job.file.text):
            continue
        for script in scripts(files):
            if script.path.rpartition("/")[2] in job.file.text:
                yield from _by_number(job, script, bound[0])


def _by_number(job: Job, script: Script, bound: str) -> Iterator[Hit]:
    if _ANYWAY.search(script.python.text):
        return
    for call in script.called("torch.cuda.set_device"):
        given = call.argument("device", 0)
        chosen = script.bound(given) if given is not None else None
        if any(each is not None and _CHOSEN.search(ast.unparse(each)) for each in (given, chosen)):
            message = f"{bound} in {job.file.name.rpartition('/')[2]} shows each task one GPU, whose number is 0."
            fix = f"Take {bound} out (--gpus-per-node instead), or call set_device(0)."
            yield script.hit(call, f"{message} All tasks of a node but the first: invalid device ordinal.", fix)
