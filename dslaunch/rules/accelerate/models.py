"""Which models a script hands to accelerate: several to one engine, or one that isn't trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.tree import ACCELERATOR, Call, Script, scripts
from dslaunch.rules.settings import Settings


@rule(
    "accelerate.models", severity="error", raised_by="accelerate",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py _prepare_deepspeed 1.15.0, run on two ranks",
)  # fmt: skip
def models(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Two models for one engine of DeepSpeed, or a frozen one for DistributedDataParallel."""
    kinds = {str(file.get("distributed_type")).upper() for file in files.of("accelerate")}
    for script in scripts(files):
        made = script.called(*ACCELERATOR)
        if (
            len(made) != 1
            or "use_deepspeed_plugin" in script.python.text
            or "select_deepspeed" in script.python.text
        ):
            continue
        plugins = [made[0].keyword(name) for name in ("deepspeed_plugin", "deepspeed_plugins")]
        engine = kinds == {"DEEPSPEED"} or any(
            isinstance(found, ast.Call) and script.name(found.func).endswith("DeepSpeedPlugin")
            for found in map(script.bound, plugins)
        )
        seen: list[str] = []
        for call in script.methods("prepare"):
            if call.owner not in script.accelerators or call.unpacks or list(guards(call)):
                continue
            ours = [name for each in call.node.args if (name := model_named(script, each))]
            seen += [name for name in ours if name not in seen]
            frozen = [name for name in ours if _is_frozen(script, name, call)]
            if engine and len(seen) > 1:
                message = (
                    f"{seen[0]} and {seen[1]} for one Accelerator under DeepSpeed, which makes one engine: "
                    "AssertionError."
                )
                yield script.hit(
                    call, message, f"Move {seen[1]} by .to({call.owner}.device), if it isn't trained."
                )
                break
            if kinds == {"MULTI_GPU"} and frozen:
                message = (
                    f"no parameter of {frozen[0]} gets a gradient: DistributedDataParallel raises RuntimeError, "
                    "it is not needed."
                )
                yield script.hit(call, message, f"Don't prepare it: {frozen[0]}.to({call.owner}.device).")


def model_named(script: Script, node: ast.expr) -> str:
    """The name of a model: one with parameters, or that is loaded as a model; empty for anything else."""
    if not isinstance(node, ast.Name):
        return ""
    made = script.bound(node)
    name = script.name(made.func) if isinstance(made, ast.Call) else ""
    loaded = re.search(r"(?:AutoModel\w*|For[A-Z]\w+|Model)\.from_pretrained$", name)
    classes = (
        each for each in script.nodes if isinstance(each, ast.ClassDef) and each.name == name
    )
    own = any("Module" in ast.unparse(base) for each in classes for base in each.bases)
    built = name.startswith("torch.nn.") and not name.endswith("Loss")
    return node.id if loaded or own or built else ""


def _is_frozen(script: Script, name: str, before: Call) -> bool:
    """Whether all of a model is frozen above a call: `teacher.requires_grad_(False)`."""
    return any(
        call.owner == name and call.node.lineno < before.node.lineno and not list(guards(call))
        and [script.constant(each) for each in call.node.args] == [False]
        for call in script.methods("requires_grad_")
    )  # fmt: skip
