"""Optimizers that are made before what they are to train can be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.freezing import trains_later
from dslaunch.rules.scripts.objects import assigned, beside, class_of
from dslaunch.rules.scripts.tree import FSDP, FULLY_SHARD, Call, Script, scripts
from dslaunch.rules.scripts.wrapping import in_branch, straight_before
from dslaunch.rules.settings import Settings

_OPTIMIZERS = re.compile(r"\btorch\.optim\.[A-Z]|\boptim\.[A-Z]|\bAdamW?\(|\bSGD\(")
_THOSE_THAT_TRAIN = re.compile(r"\bif \w+\.requires_grad\b|: \w+\.requires_grad\b")
"""How parameters are chosen: `[p for p in model.parameters() if p.requires_grad]`, `filter(lambda p: ...)`."""
_MOST = 20
"""Calls of one kind that are looked at."""
_UNFREEZES = re.compile(r"requires_grad_\((?:True)?\)|requires_grad = True")


@rule("script.optimizer-early", severity="wrong", raised_by="nobody", evidence="torch 2.13 and peft 0.21.2, run")
def early(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An optimizer of the parameters that train, above the line that lets others train: it never holds those."""
    every = list(scripts(files))
    for script in every:
        if "add_param_group" in script.python.text:
            continue
        for call in script.calls:
            model = _chosen(script, call, every)
            later = _unfrozen(script, call, model, every) if model else None
            if later is not None:
                message = (
                    f"{_said(later)} in line {later.lineno} lets parameters train that this optimizer, made "
                    "before, doesn't hold: they keep their values, without a word."
                )
                yield script.hit(call, message, "Make the optimizer after that line.")


def _chosen(script: Script, call: Call, every: list[Script]) -> str:
    """The model of whose parameters an optimizer gets those that train, also by a function; else empty."""
    if call.name.startswith("torch.optim.") and "lr_scheduler" not in call.name:
        given = call.argument("params", 0)
        text = _all_of(script, given) if given is not None else ""
        found = re.search(r"\b([A-Za-z_]\w*)\.(?:named_)?parameters\(\)", text)
        return found.group(1) if found and _THOSE_THAT_TRAIN.search(text) else ""
    if "optim" not in call.method or not call.node.args or not isinstance(call.node.args[0], ast.Name):
        return ""
    of = [script] if call.name in script.functions else beside(script, call.name, every)
    for other in of:
        function = other.functions.get(call.method)
        text = ast.unparse(function) if function is not None and function.args.args else ""
        name = function.args.args[0].arg if function is not None and text else ""
        own = name and re.search(rf"\b{name}\.(?:named_)?parameters\(\)", text)
        if own and _OPTIMIZERS.search(text) and _THOSE_THAT_TRAIN.search(text):
            return call.node.args[0].id
    return ""


def _all_of(script: Script, given: ast.expr) -> str:
    """An expression as it is written, with what its names are bound to."""
    texts, waiting = dict[str, None](), [given]
    while waiting:
        node = waiting.pop()
        text = ast.unparse(node)
        if text not in texts:
            texts[text] = None
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            waiting += [value for name in sorted(names) for value in assigned(script, name)[:1]]
    return " ".join(texts)


def _unfrozen(script: Script, call: Call, model: str, every: list[Script]) -> ast.stmt | None:
    """The first statement of the function, below the call and above its loops, that lets a part of it train."""
    body = call.function.body if call.function is not None else script.python.tree.body
    for node in body:
        if node.lineno <= call.node.lineno:
            continue
        if any(isinstance(each, ast.Attribute) and each.attr == "backward" for each in ast.walk(node)):
            return None
        if trains_later(node, model) or _adapts(script, node, model) or _by_method(script, node, model, every):
            return node
    return None


def _adapts(script: Script, node: ast.stmt, model: str) -> bool:
    """`model = get_peft_model(model, ...)`, which freezes the model and adds what trains."""
    made = node.value if isinstance(node, ast.Assign) else None
    peft = isinstance(made, ast.Call) and script.name(made.func) == "peft.get_peft_model"
    return peft and isinstance(made, ast.Call) and bool(made.args) and ast.unparse(made.args[0]) == model


def _by_method(script: Script, node: ast.stmt, model: str, every: list[Script]) -> bool:
    """Whether it calls a method of the model, of a class that the files show, which lets something train."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    if call is None or not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) != model:
        return False
    made = class_of(script, call.func.value, every)
    functions = [each for each in made.body if isinstance(each, ast.FunctionDef)] if made is not None else []
    return any(each.name == call.func.attr and _UNFREEZES.search(ast.unparse(each)) for each in functions)


def _said(node: ast.stmt) -> str:
    return ast.unparse(node).partition("\n")[0]


@rule(
    "script.optimizer-before-wrap", severity="wrong", raised_by="nobody",
    evidence="torch 2.13, run for fully_shard; PyTorch 2.13 documentation: FullyShardedDataParallel",
)  # fmt: skip
def optimizer_first(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An optimizer made before FSDP replaces the parameters: it steps those that no longer count."""
    for script in scripts(files):
        made_by = [call for call in script.calls if call.name.startswith("torch.optim.")][:_MOST]
        wraps = script.called(FSDP, *FULLY_SHARD)[:_MOST] if made_by else []
        for call in (*wraps, *_by_functions(script, [each for each in wraps if each.name in FULLY_SHARD])):
            model = _first_name(call)
            keeps = call.keyword("use_orig_params")
            if not model or (keeps is not None and ast.unparse(keeps) != "False") or call.unpacks:
                continue
            for made in (*made_by, *_by_functions(script, made_by)):
                optimizes = _optimizes(script, made, model) or _makes_optimizer(script, made, model)
                if optimizes and straight_before(script, made, call, model):
                    message = (
                        f"{call.method} in line {call.node.lineno} replaces the parameters that this optimizer "
                        "holds: it trains nothing, without a word."
                    )
                    yield script.hit(made, message, f"Make the optimizer after {call.method}.")


def _by_functions(script: Script, inner: list[Call]) -> list[Call]:
    """Calls of the file's functions in which some calls stand straight, whose first argument is a name."""
    functions = {each.function.name for each in inner if each.function in script.python.tree.body
                 and each.function is not None and not in_branch(each)}  # fmt: skip
    return [call for call in script.called(*functions) if call.node.args][:_MOST] if functions else []


def _makes_optimizer(script: Script, call: Call, model: str) -> bool:
    """Whether a function of the file makes an optimizer of the model that it is given first."""
    function = script.functions.get(call.name)
    if function is None or not function.args.args or ast.unparse(call.node.args[0]) != model:
        return False
    inner = function.args.args[0].arg
    return any(_optimizes(script, each, inner) for each in script.calls_of.get(function, ()))


def _first_name(call: Call) -> str:
    """The model that is wrapped, where it is a name."""
    given = call.argument("module", 0)
    return given.id if isinstance(given, ast.Name) else ""


def _optimizes(script: Script, call: Call, model: str) -> bool:
    """Whether an optimizer of torch's takes a model's parameters, by groups of another name too."""
    params = call.argument("params", 0)
    if not call.name.startswith("torch.optim.") or "lr_scheduler" in call.name or params is None:
        return False
    waiting, texts = [params], set[str]()
    while waiting:
        node = waiting.pop()
        text = ast.unparse(node)
        if text not in texts:
            texts.add(text)
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            waiting += [value for each in names for value in possible(script, each, call.around)]
    owned = rf"\b{re.escape(model)}\.(?:named_)?parameters\(\)"
    return any(re.search(owned, text) for text in texts)
