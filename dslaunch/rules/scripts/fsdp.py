"""Training scripts that wrap a model in FSDP, and clip, freeze or optimize it as if it were whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.freezing import states
from dslaunch.rules.scripts.guards import one_rank_guard
from dslaunch.rules.scripts.tree import FSDP, FULLY_SHARD, Call, Script, is_none, scripts
from dslaunch.rules.settings import Settings

_RAN = "torch 2.13, run on two ranks"
_GATHERED = re.compile(r"optim_state_dict|optimizer_state_dict|get_state_dict")
_WHOLE = re.compile(r"NO_SHARD")
_APART = re.compile(r"lambda|fsdp_auto_wrap_policy|lambda_auto_wrap_policy|_or_policy|CustomPolicy")
"""Policies that may put what is trained into units of its own."""


@rule("script.fsdp-clipping", severity="wrong", raised_by="nobody", evidence=_RAN)
def clipping(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch's clipping of a model under FSDP: each rank sees the norm of its own shard."""
    for script in scripts(files):
        models = script.sharded if not _WHOLE.search(script.python.text) else set()
        for call in script.methods("clip_grad_norm_") if models else ():
            given = ast.unparse(call.node.args[0]) if call.node.args else ""
            name = next((each for each in models if given == f"{each}.parameters()"), "")
            if name and call.name.startswith("torch.nn.utils") and not _of_another_class(script, call, name):
                message = (
                    "under FSDP each rank has the gradients of its shard: it computes the norm of these alone, "
                    "and scales them by a factor of its own."
                )
                yield script.hit(call, message, f"Call {name}.clip_grad_norm_(...), on all ranks.")


def _of_another_class(script: Script, call: Call, name: str) -> bool:
    """Whether an attribute, as `self.model`, is wrapped in other classes alone than that of the call."""
    made = (each for each in script.called(FSDP) if isinstance(target := each.around[0], ast.Assign)
            and ast.unparse(target.targets[0]) == name)  # fmt: skip
    return name.startswith("self.") and _class(call) not in map(_class, made)


def _class(call: Call) -> ast.ClassDef | None:
    return next((node for node in call.around if isinstance(node, ast.ClassDef)), None)


@rule("script.fsdp-optimizer", severity="wrong", raised_by="nobody", evidence=_RAN)
def optimizer_state(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An optimizer's state under FSDP that one rank saves: the moments of its own shard, and no other's."""
    for script in scripts(files):
        sharded = script.called(FSDP, *FULLY_SHARD) and not _WHOLE.search(script.python.text)
        if not sharded or _GATHERED.search(script.python.text):
            continue
        for call in script.called("torch.save"):
            saved = [each for each in ast.walk(call.node) if isinstance(each, ast.Call)]
            if one_rank_guard(call) and any(_is_optimizers(script, each, call) for each in saved):
                message = "one rank's shard alone: the moments of all others are lost, and a resume goes wrong."
                fix = "Gather it on all ranks: FSDP.optim_state_dict, or get_optimizer_state_dict."
                yield script.hit(call, message, fix)


def _is_optimizers(script: Script, node: ast.Call, call: Call) -> bool:
    """Whether it is `state_dict()` of what a class of torch.optim makes."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "state_dict":
        return False
    made = possible(script, node.func.value, call.around)
    names = (script.name(each.func) for each in made if isinstance(each, ast.Call))
    return any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in names)


@rule("script.fsdp-frozen", severity="error", raised_by="torch", evidence=_RAN)
def frozen(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A partly frozen model under FSDP without use_orig_params: frozen and trained weights in one flat tensor."""
    for script in scripts(files):
        wraps = script.called(FSDP)
        for call in wraps:
            own, policy = call.keyword("use_orig_params"), call.keyword("auto_wrap_policy")
            if call.unpacks or (own is not None and script.constant(own) is not False):
                continue
            told = _text(script, call, policy)
            if _APART.search(told) or not _is_torchs(script, call, policy):
                continue
            given = call.argument("module", 0)
            made = possible(script, given, call.around) if given is not None else []
            why = ""
            if any(_adapts(script, each, call) for each in made):
                why = "the model has frozen weights beside its adapters"
            elif isinstance(given, ast.Name) and len(wraps) == 1 and not _leaves_out(call):
                whole = policy is None or is_none(policy)
                state = states(_above(script, call), given.id)
                if state.mixed and (whole or (_IN_LAYERS.search(state.words) and "size_based" not in told)):
                    why = f"line {state.line} has a part of the model trained alone"
            if why:
                switched = "is False" if own is not None else "is false unless given"
                message = f"use_orig_params {switched}, and {why}: ValueError, Must flatten tensors with uniform "
                fix = "Give use_orig_params=True, or a policy that puts what is trained into units of its own."
                yield script.hit(call, f"{message}requires_grad.", fix)


@rule("script.fsdp-policy", severity="error", raised_by="python", evidence="torch 2.13, run")
def policy_called(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A policy that FSDP is to call for each module, called by the script itself."""
    for script in scripts(files):
        for call in script.calls:
            if call.owner != "torch.distributed.fsdp.wrap" or call.method not in _POLICIES or call.unpacks:
                continue
            if not call.node.args and not {each.arg for each in call.node.keywords} & {"module", "recurse"}:
                message = f"{call.method} is called here, without the module that FSDP gives it: TypeError."
                fix = f"Write functools.partial({call.method}, ...)."
                yield script.hit(call, message, fix)


_POLICIES = ("size_based_auto_wrap_policy", "transformer_auto_wrap_policy", "lambda_auto_wrap_policy")


_IN_LAYERS = re.compile(r"lora|adapter|bias|norm|attn|attention|mlp|[qkvo]_proj|(?:up|down|gate)_proj")
"""What parts of each layer are named, so that a unit of one layer has some of both kinds."""


def _leaves_out(call: Call) -> bool:
    return any(call.keyword(each) is not None for each in ("ignored_modules", "ignored_states"))


def _is_torchs(script: Script, call: Call, policy: ast.expr | None) -> bool:
    """Whether a policy is none that a function of another module makes as it likes."""
    chosen = [policy.body, policy.orelse] if isinstance(policy, ast.IfExp) else [policy]
    found = [made for each in chosen if each is not None for made in possible(script, each, call.around)]
    names = (script.name(each.func) for each in found if isinstance(each, ast.Call))
    return all(name.startswith(("functools.partial", "torch.distributed.fsdp.")) for name in names)


def _above(script: Script, call: Call) -> list[ast.stmt]:
    """The statements of the call's function before it, outside of branches."""
    body = call.function.body if call.function is not None else script.python.tree.body
    return [each for each in body if (each.end_lineno or each.lineno) < call.node.lineno]


def _text(script: Script, call: Call, policy: ast.expr | None) -> str:
    """A policy with what its name is bound to, as it is written."""
    found = possible(script, policy, call.around) if policy is not None else []
    return " ".join(ast.unparse(each) for each in (*found, *([policy] if policy is not None else ())))


def _adapts(script: Script, node: ast.expr, call: Call) -> bool:
    """Whether it is a model of get_peft_model, moved or cast since."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS:
        inner = possible(script, node.func.value, call.around)
        if len(inner) != 1 or inner[0] is node:
            return False
        node = inner[0]
    return isinstance(node, ast.Call) and script.name(node.func) == "peft.get_peft_model"


_KEEPS = ("to", "cuda", "bfloat16", "half", "float", "train")


@rule(
    "accelerate.original-parameters", severity="wrong", raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/accelerator.py _prepare_fsdp1 1.15.0, #3256; torch 2.13, run",
)  # fmt: skip
def original_parameters(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """fsdp_use_orig_params: false beside a script whose optimizer is made before the model is wrapped."""
    for file in files.of("accelerate"):
        original, version = (
            file.get("fsdp_config", f"fsdp_{name}") for name in ("use_orig_params", "version")
        )
        if original is not False or version not in (None, 1):
            continue
        for script in scripts(files):
            prepares = [call for call in script.methods("prepare") if call.owner in script.accelerators]
            for call in script.calls if prepares else ():
                if call.name.startswith("torch.optim.") and "lr_scheduler" not in call.name:
                    model = _optimized(call)
                    wraps = [
                        each for each in prepares if any(ast.unparse(one) == model for one in each.node.args)
                    ]
                    if wraps and all(call.node.lineno < each.node.lineno for each in wraps):
                        message = (
                            f"{script.path}:{call.node.lineno} makes the optimizer before prepare flattens the "
                            "parameters that it holds: it trains nothing, without a word."
                        )
                        fix = "Write true, with which the optimizer keeps its parameters."
                        at = file.at("fsdp_config", "fsdp_use_orig_params")
                        yield Hit(file.name, at, message, fix)


def _optimized(call: Call) -> str:
    """The model whose parameters an optimizer gets."""
    given = call.argument("params", 0)
    text = ast.unparse(given) if given is not None else ""
    found = re.search(r"\b([A-Za-z_][\w.]*)\.(?:named_)?parameters\(\)", text)
    return found.group(1) if found else ""
