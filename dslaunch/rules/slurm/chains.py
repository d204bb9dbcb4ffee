"""Jobs that wait for jobs, steps that wait for steps, and memory that ends a job as it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments, launcher_options
from dslaunch.files.script import Command
from dslaunch.files.switches import SWITCHES
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.slurm.job import Job, jobs

_RAN = "SLURM 22.05, run"
_SUBMITS = re.compile(
    r"^[ \t]*(?:export\s+|local\s+)?(?P<name>[A-Za-z_]\w*)=[\"']?(?P<call>\$\(|`)\s*sbatch\b(?P<rest>[^)`|]*)[)`]",
    re.MULTILINE,
)
_CUTS = r"\$\{{{0}[#%/:]|\$\{{?{0}\}}?[\"']?\s*(?:\||\))|<<<\s*[\"']?\$\{{?{0}\b|(?:\+=|\bread\b).*{0}|\b{0}=\$\{{"
"""Where the number is taken out of the sentence: ${JID##* }, echo $JID | awk, <<< "$JID"."""


@rule("slurm.job-id", severity="error", raised_by="sbatch", evidence=_RAN)
def job_id(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What sbatch prints, taken for a job's number: without --parsable it is a sentence."""
    for file, _ in files.scripts():
        for found in _SUBMITS.finditer(file.text):
            name = found["name"]
            if "--parsable" in found["rest"] or re.search(_CUTS.format(name), file.text):
                continue
            used = re.search(rf"(?:--dependency|-d)[= ][\"']?\w*:?\$\{{?{name}\}}?(?!\w)", file.text)
            if used:
                at = file.places.position(found.start("name"))
                message = f"{name} is `{_SENTENCE}`: no number, and sbatch refuses it as a dependency."
                yield Hit(file.name, at, message, _PARSABLE)
        for found in _AT_ONCE.finditer(file.text):
            if "--parsable" not in found["rest"]:
                at = file.places.position(found.start())
                message = f"sbatch prints `{_SENTENCE}`: no number, and refused as a dependency."
                yield Hit(file.name, at, message, _PARSABLE)


_AT_ONCE = re.compile(r"(?:--dependency|-d)[= ][\"']?\w*:?(?:\$\(|`)\s*sbatch\b(?P<rest>[^)`|\n]*)[)`]")
_SENTENCE = "Submitted batch job N"
_PARSABLE = "Write sbatch --parsable, which prints the number alone."


_ROOM = (
    "--overlap", "--exact", "--whole", "-c", "--cpus-per-task", "--gres", "--gpus", "-G", "--gpus-per-node",
    "--gpus-per-task", "--mem", "--het-group", "--pack-group", "-O", "--overcommit", "-s", "--oversubscribe",
    "--jobid", "--exclusive",
)  # fmt: skip
"""Options with which a step may leave room for another on its nodes."""
_PARTS = ("-w", "--nodelist", "-r", "--relative", "-x", "--exclude", "-N", "--nodes", "-n", "--ntasks")
"""Options with which a step may take a part of the nodes."""
_ENDLESS = re.compile(
    r"while (?:true|:|\[)|while sleep|tail -\w*[fF]|sleep inf|nvidia-smi dmon|nvidia-smi .*(?:-l|--loop)"
    r"|tensorboard|dcgm|ray start|\bserve\b|server|prometheus|node_exporter|gpustat|monitor"
)


@rule("slurm.held-step", severity="hang", raised_by="srun", evidence=f"{_RAN}; srun's manual page, --overlap")
def held_step(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A step in the background holds the job's CPUs and GPUs, and the next one waits for them."""
    for job in jobs(files):
        if re.search(r"SLURM_(?:OVERLAP|EXACT)=", job.file.text):
            continue
        running: list[tuple[Command, Arguments]] = []
        for command in job.script.commands:
            name = command.words[0].text
            if name in ("wait", "kill", "scancel"):
                running = []
            elif name == "srun" and not command.conditional:
                options, _ = launcher_options(command.words[1:], SWITCHES["srun"], joined=True)
                if not options.complete or options.has(*_ROOM):
                    continue
                before = [each for each, given in running if _meet(each, given, options)]
                if before and not command.background:
                    yield _held(job.file, before[0], command)
                    break
                running += [(command, options)] if command.background else []


def _meet(first: Command, given: Arguments, options: Arguments) -> bool:
    """Whether a step needs a node that the one in the background holds."""
    if not given.has(*_PARTS):
        return not options.has(*_PARTS) or _is_endless(first)
    named = given.value("-w", "--nodelist")
    same = named is not None and named == options.value("-w", "--nodelist")
    return _is_endless(first) and (same or not options.has(*_PARTS))


def _is_endless(step: Command) -> bool:
    return _ENDLESS.search(" ".join(word.text for word in step.words)) is not None


def _held(file: File, first: Command, second: Command) -> Hit:
    endless = _is_endless(first)
    severity: Severity = "hang" if endless else "info"
    until = "and it doesn't end" if endless else "until it has ended"
    held = f"the step of line {first.at.line} holds all that its nodes have"
    message = f"{held}: since SLURM 20.11 this one waits for it, {until}."
    return Hit(file.name, second.at, message, "Give the step in the background --overlap.", severity)


_LEAST = {"--mem": 2048, "--mem-per-gpu": 1024, "--mem-per-cpu": 100}
"""Megabytes below which Python and torch don't start."""
_BARE = re.compile(r"0*[1-9]\d*")


@rule("slurm.small-memory", severity="error", raised_by="nobody", evidence=f"{_RAN}; sbatch's manual page, --mem")
def small_memory(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Memory as a bare number, which counts megabytes: too little for torch to start."""
    for job in jobs(files):
        if job.script.launches and job.file.holds(_TORCH):
            yield from _too_little(job)


_TORCH = re.compile(r"python|torchrun|deepspeed|accelerate|\.py\b|\.sif\b|--container-image")
"""What may import torch: a job of the shell alone needs no more."""


def _too_little(job: Job) -> Iterator[Hit]:
    for name, least in _LEAST.items():
        found = job.directive(name)
        if found is not None and _BARE.fullmatch(found.value) and int(found.value) < least:
            size = int(found.value)
            message = f"{found.name} {size} is {size} megabytes: the job is killed as soon as torch is imported."
            yield Hit(job.file.name, found.at, message, f"Write {size}G if gigabytes are meant.")
