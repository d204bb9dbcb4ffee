"""The environment that DeepSpeed's launcher hands to other nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments
from dslaunch.files.position import START
from dslaunch.files.script import ShellScript
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import scripts
from dslaunch.rules.settings import Settings

_RUNNER = (
    "deepspeedai/DeepSpeed:deepspeed/launcher/runner.py main, multinode_runner.py add_export 0.19.8, run"
)
_FORWARDED = ("NCCL", "PYTHON", "MLFLOW", "MV2", "UCX")
"""Prefixes that the launcher exports by itself (EXPORT_ENVS, and the accelerator's)."""
_NEEDED = (
    "CUDA_", "GLOO_", "HF_", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTORCH_", "TOKENIZERS_", "TORCH_",
    "TRANSFORMERS_", "TRITON_", "WANDB_",
)  # fmt: skip
_PER_NODE = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_HOME"})
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "hpu", "mps", "mlu", "sdaa", "supa", "klxpu", "xpu.external")


@rule("deepspeed-env.line", severity="error", raised_by="deepspeed launcher", evidence=_RUNNER)
def line(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A line of .deepspeed_env without `=`: a blank one, or a remark."""
    for file in files.of("deepspeed_env"):
        for entry in file.value:
            if "=" not in entry.text:
                what = repr(entry.text[:40]) if entry.text else "a blank line"
                message = f"{what} has no '=': the launcher raises ValueError on several nodes."
                yield Hit(file.name, entry.at, message, "Delete the line; only NAME=VALUE may stand here.")


@rule("deepspeed-env.name", severity="wrong", raised_by="nobody", evidence=_RUNNER)
def name(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A line of .deepspeed_env whose name no shell can export: a remark with `=`, or `export`."""
    for file in files.of("deepspeed_env"):
        for entry in file.value:
            if entry.text.startswith("#") and "=" in entry.text:
                message = "a remark with '=' is exported, and comments out the rest of the remote command."
                yield Hit(file.name, entry.at, message, "Delete the line.", severity="error")
            elif entry.name.startswith("export "):
                message = "'export' is written again by the launcher, which exports a variable of that name."
                yield Hit(file.name, entry.at, message, "Write NAME=VALUE alone.")


@rule("deepspeed-env.value", severity="wrong", raised_by="nobody", evidence=_RUNNER)
def value(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value of .deepspeed_env with quotes, or one that the other node expands."""
    for file in files.of("deepspeed_env"):
        for entry in file.value:
            if entry.text.startswith("#"):
                continue
            if entry.value[:1] in ("'", '"'):
                message = (
                    f"the quotes of {entry.name} become part of the value, or split it on the other node."
                )
                yield Hit(file.name, entry.at, message, "Write the value without quotes.")
            elif "$" in entry.value or "`" in entry.value:
                message = f"{entry.name} is expanded on the other node, with that node's variables."
                own = entry.name.isidentifier() and _extends(entry.name, entry.value)
                yield Hit(file.name, entry.at, message, "Write the value out.", "info" if own else None)


def _extends(name: str, value: str) -> bool:
    """Whether a value adds to what the other node has: PATH=$PATH:/opt/bin."""
    rest = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", "", value)
    return rest != value and "$" not in rest and "`" not in rest


@rule(
    "env.deepspeed", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeedai/DeepSpeed:deepspeed/constants.py, accelerator/real_accelerator.py 0.19.8, run",
)  # fmt: skip
def variables(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable of DeepSpeed's own with a value that it refuses."""
    for file in files.files:
        for found in (found for found in file.assignments if found.literal and found.value):
            if found.name == "DEEPSPEED_TIMEOUT" and not found.value.isdecimal():
                message = f"DEEPSPEED_TIMEOUT is {found.value!r}: ValueError when deepspeed is imported."
                yield Hit(file.name, found.at, message, "Write whole minutes.")
            elif found.name == "DS_ACCELERATOR" and found.value not in _ACCELERATORS:
                message = f"DS_ACCELERATOR is {found.value!r}: DeepSpeed raises ValueError."
                yield Hit(file.name, found.at, message, f"Use {listed(_ACCELERATORS)}.")


@rule("env.forwarding", severity="wrong", raised_by="nobody", evidence=f"{_RUNNER}; DeepSpeed#4370, #2802")
def forwarding(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable that the script sets, and DeepSpeed's launcher doesn't hand to other nodes."""
    handed = {entry.name for file in files.of("deepspeed_env") for entry in file.value}
    handed |= {found[1] for file in files.of("shell") for found in _PRINTED.finditer(file.text)}
    for file, script in files.scripts():
        launchers = [command.launcher("deepspeed") for command in script.launches]
        if not any(launcher and _over_nodes(launcher.options) for launcher in launchers):
            continue
        if any(found.name == "AISC_JOB_NAME" for found in script.assignments):
            yield from _left_by_aisc(file, script, handed)
        read = _read_by_scripts(files)
        left = {
            found.name: found for found in reversed(script.assignments)
            if found.name not in handed | _PER_NODE and not found.name.startswith(_FORWARDED)
            and (found.name.startswith(_NEEDED) or found.name in read) and _is_exported(file, found)
        }  # fmt: skip
        if left:
            first = min(left.values(), key=lambda found: found.at)
            names = listed([found.name for found in sorted(left.values(), key=lambda found: found.at)], limit=6)
            verb = "reaches" if len(left) == 1 else "reach"
            message = f"{names} {verb} this node alone: the launcher hands on {listed(_FORWARDED)}* only."
            yield Hit(file.name, first.at, message, "Write it in .deepspeed_env (NAME=VALUE) too.")


_PRINTED = re.compile(
    r"\b(?:echo|printf)[ \t]+[\"']?(\w+)=[^\n]*>[ \t]*[\"']?(?:\S*\.deepspeed_env\b|\$\{?DS_ENV_FILE\b)"
)
"""`echo "NAME=$NAME" >> .deepspeed_env`."""


def _read_by_scripts(files: FileSet) -> set[str]:
    """Variables that the Python files ask for by name."""
    found: set[str] = set()
    for script in scripts(files):
        asked = [call.argument("key", 0) for call in script.called("os.environ.get", "os.getenv")]
        asked += [
            node.slice for node in script.nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            and script.name(node.value) == "os.environ"
        ]  # fmt: skip
        found |= {str(name) for each in asked if (name := script.constant(each)) is not None}
    return found - _GIVEN


_GIVEN = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""What the launcher itself sets on each node."""


def _is_exported(file: File, found: Assignment) -> bool:
    """Whether programs get a variable at all: by export, by `set -a`, or as it stands before a command."""
    line = file.lines[found.at.line - 1]
    before, behind = line[: found.at.column - 1], line[found.at.column - 1 :]
    marked = re.search(rf"{_EXPORTS}\s[^;]*$", before) or re.search(
        rf"{_EXPORTS}\s[^#;\n]*\b{found.name}\b|^\s*set\s+-\w*a\b|^\s*set\s+-o\s+allexport|--export[= ]",
        file.text, re.MULTILINE,
    )  # fmt: skip
    return marked is not None or re.match(_BEFORE, behind) is not None


_BEFORE = r"\w+=(?:'[^']*'|\"[^\"]*\"|[^\s'\"])*[ \t]+[^\s#&|;]"
_EXPORTS = r"\b(?:export|(?:declare|typeset)\s+-\w*x\w*)"


def _left_by_aisc(file: File, script: ShellScript, handed: set[str]) -> Iterator[Hit]:
    """Two variables of the fabric that the launcher leaves out on Azure's AISC."""
    for found in script.assignments:
        if found.name in ("NCCL_IB_HCA", "UCX_NET_DEVICES") and found.name not in handed:
            message = f"{found.name} reaches this node alone where AISC_JOB_NAME is set."
            yield Hit(file.name, found.at, message, "Write it in .deepspeed_env (NAME=VALUE) too.")


@rule("deepspeed-env.local", severity="info", raised_by="nobody", evidence=_RUNNER)
def local(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A .deepspeed_env beside a launch on one node, which doesn't read it."""
    launchers = [command.launcher("deepspeed") for _, command in files.launches()]
    started = [launcher.options for launcher in launchers if launcher is not None]
    if started and not any(options.has("--hostfile", "-H", "--force_multi") for options in started):
        for file in files.of("deepspeed_env"):
            message = "read for several nodes alone (unless /job/hostfile is there): on one node nothing is set."
            yield Hit(file.name, START, message, "Export the variables in the script.")


@rule("deepspeed-env.two", severity="info", raised_by="nobody", evidence=_RUNNER)
def two(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A variable in two .deepspeed_env, of which that of the current folder counts."""
    seen: dict[str, tuple[str, str]] = {}
    for file in files.of("deepspeed_env"):
        for entry in file.value:
            value, first = seen.setdefault(entry.name, (entry.value, file.name))
            if entry.name and first != file.name and value != entry.value:
                message = f"{entry.name} has another value in {first}; that of the folder where it starts counts."
                yield Hit(file.name, entry.at, message, "Keep one of them.")


def _over_nodes(options: Arguments) -> bool:
    return options.has("--hostfile", "-H") and not options.has("--no_ssh")
