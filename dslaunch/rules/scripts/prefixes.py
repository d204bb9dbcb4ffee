"""Where the state of a model under DDP goes: into a file, and back into a model that isn't wrapped yet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.rules.registry import Hit
from dslaunch.rules.scripts.bindings import possible
from dslaunch.rules.scripts.tree import DDP, Call, Script


def handed(script: Script, call: Call, wrapped: set[str]) -> str:
    """The wrapped model whose state is asked for, of an argument of the function too; empty where it is none."""
    return _handed(script, call, call.owner, wrapped)


def _handed(script: Script, call: Call, owner: str, wrapped: set[str]) -> str:
    function = call.function
    names = [each.arg for each in function.args.args] if function is not None else []
    if owner not in names or function is None:
        return owner if owner in wrapped else ""
    if function not in script.python.tree.body:
        return ""
    place = names.index(owner)
    given = [each.argument(owner, place) for each in script.called(function.name)]
    texts = {ast.unparse(each) if each is not None else "" for each in given}
    return texts.pop() if len(texts) == 1 and texts <= wrapped else ""


def _loaded_after(script: Script, wrapped: set[str]) -> Call | None:
    """The call that loads into a model under DDP what the script saved of the model within it."""
    states = script.methods("state_dict")
    bare = any(_handed(script, each, each.owner.removesuffix(".module"), wrapped)
               for each in states if each.owner.endswith(".module"))  # fmt: skip
    if not bare or any(handed(script, each, wrapped) for each in states):
        return None
    for made in script.called(DDP):
        target = made.around[0] if made.around else None
        name = ast.unparse(target.targets[0]) if isinstance(target, ast.Assign) else ""
        for call in script.methods("load_state_dict"):
            below = call.function is made.function and call.node.lineno > made.node.lineno
            if below and call.owner == name and _is_of_file(script, call):
                return call
    return None


def loaded_before(script: Script, name: str, by: str = DDP) -> Call | None:
    """The call that loads a state of torch.load into a model, above the line that wraps or compiles it."""
    for made in script.called(by):
        target = made.around[0] if made.around else None
        given = made.argument("model" if by == COMPILE else "module", 0)
        if not isinstance(target, ast.Assign) or ast.unparse(target.targets[0]) != name or given is None:
            continue
        inner = ast.unparse(given)
        for call in script.methods("load_state_dict"):
            above = call.function is made.function and call.node.lineno < made.node.lineno
            if above and call.owner == inner and _is_of_file(script, call):
                return call
    return None


COMPILE = "torch.compile"
_OWN = re.compile(r"(?i)resume|checkpoint|ckpt|latest|last|snapshot")
"""What a file is called that the script has saved itself, and not the weights that it starts from."""


def _is_of_file(script: Script, call: Call) -> bool:
    """Whether what is loaded, all of it and strictly, comes from such a file."""
    strict = call.argument("strict", 1)
    if strict is not None or not call.node.args:
        return False
    waiting, seen = [call.node.args[0]], set[str]()
    while waiting:
        node = waiting.pop()
        text = ast.unparse(node)
        if isinstance(node, ast.Call) and script.name(node.func) == "torch.load":
            return _OWN.search(text) is not None
        if text not in seen:
            seen.add(text)
            waiting += [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            waiting += [value for each in names for value in possible(script, each, call.around)]
    return False


def of_resumes(script: Script) -> Iterator[Hit]:
    """A restart that loads other names than were saved: no prefix into DDP's, or torch.compile's prefix."""
    fails = "RuntimeError, Missing key(s) in state_dict."
    if (loads := _loaded_after(script, script.assigned(DDP))) is not None:
        message = f"{loads.owner} is wrapped, and the names in the file have no `module.` before them: {fails}"
        found = script.hit(loads, message, f"Write {loads.owner}.module.load_state_dict(...).")
        yield replace(found, severity="error", raised_by="torch")
    for call in script.methods("state_dict") if "_orig_mod" not in script.python.text else ():
        name = handed(script, call, script.assigned(COMPILE))
        loads = loaded_before(script, name, COMPILE) if name else None
        if loads is not None:
            message = (
                f"{name} is compiled: every name in the file begins with `_orig_mod.`, and line "
                f"{loads.node.lineno} loads it above the compiling: {fails}"
            )
            found = script.hit(call, message, f"Save the state of {loads.owner}, which isn't compiled.")
            yield replace(found, severity="error", raised_by="torch")
