"""conda's environments in scripts, whose shell doesn't know conda's function."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_TOOLS = frozenset({"conda", "mamba", "micromamba"})
_DEFINES = re.compile(
    r"^\s*(?:source|\.)\s|\beval\b|shell[. ]\w*hook|^\s*ml\s|BASH_ENV|^#!.*\s-\w*[li]|\bset\s+-i\b"
    r"|(?:conda|mamba)\s*\(\)|^\s*function\s+(?:conda|mamba)\b",
    re.MULTILINE,
)
"""What may define the function: a file that is read in, a hook, a login or interactive shell."""
_MODULE = re.compile(r"\bmodule[ \t]+(?!purge\b|unload\b|list\b|rm\b|-)\w+((?:[ \t]+[^\s;&|#]+)*)")
_WITHOUT = re.compile(
    r"(?:cuda|cudnn|nccl|gcc|gnu|intel|openmpi|mpi|impi|ucx|cmake|git|ninja|slurm|libfabric|aws-ofi-nccl|rocm|hpcx|nvhpc"
    r"|singularity|apptainer|pdsh|tmux|StdEnv|PrgEnv-\w+|craype\S*)(?:[/-][\w.-]+)*", re.IGNORECASE
)
"""Modules of compilers, CUDA, MPI and the like, which bring no conda along; another one may."""
_ERREXIT = re.compile(r"^\s*set\s+(?:-\w*e|.*-o\s+errexit)", re.MULTILINE)


@rule(
    "shell.conda", severity="error", raised_by="nobody",
    evidence="conda/conda:conda/cli/main_mock_activate.py 26.7.1, CondaError",
)  # fmt: skip
def conda(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """`conda activate` in a script that reads nothing in that defines conda's function."""
    for file, script in files.scripts():
        if not script.launches or not file.text.startswith("#!") or _DEFINES.search(file.text):
            continue
        modules = [name for found in _MODULE.finditer(file.text) for name in found[1].split()]
        if any(not _WITHOUT.fullmatch(name) for name in modules):
            continue
        for command in script.commands:
            words = [word.text for word in command.words[:2]]
            if len(words) < 2 or words[0] not in _TOOLS or words[1] != "activate":
                continue
            ends = _ERREXIT.search(file.text) is not None
            severity: Severity = "error" if ends else "info"
            effect = "which ends it" if ends else "and the environment stays what it was"
            message = f"a script's shell has no `{words[0]} activate`: it fails (Run 'conda init'), {effect}."
            fix = 'Write source "$(conda info --base)/etc/profile.d/conda.sh" before it.'
            yield Hit(file.name, command.at, message, fix, severity)
            break
