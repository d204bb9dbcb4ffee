"""Training scripts around deepspeed.initialize: what the engine does itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.position import lines_of
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.guards import guards
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_ENGINE = "deepspeedai/DeepSpeed:deepspeed/runtime/engine.py 0.19.8"


def _engines(files: FileSet) -> Iterator[tuple[Script, set[str]]]:
    """Scripts that call deepspeed.initialize themselves, and the names of their engines."""
    for script in scripts(files):
        if script.deepspeed and not script.by_framework:
            yield script, script.engines


@rule(
    "script.engine-backward", severity="wrong", raised_by="nobody", until="0.17.6", since="0.16.9",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py backward 0.17.6; 0.19.8 hooks loss.backward()",
)  # fmt: skip
def engine_backward(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """loss.backward() beside an engine: it neither scales the loss nor reduces gradients."""
    for script, engines in _engines(files):
        by_engine = [call for call in script.methods("backward") if call.node.args]
        for call in script.methods("backward") if engines and not by_engine else ():
            message = (
                f"{call.owner}.backward() passes the engine by: no loss scaling, no reduction of gradients."
            )
            yield script.hit(call, message, f"Call {min(engines)}.backward({call.owner}).")


@rule(
    "script.engine-clipping",
    severity="wrong",
    raised_by="nobody",
    evidence=f"{_ENGINE} clip_fp32_gradients",
    since="0.16.9",
)
def engine_clipping(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """torch's gradient clipping beside an engine: under ZeRO it sees a part of the gradients, or none."""
    for script, engines in _engines(files):
        names = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
        handed = {ast.unparse(model) for each in script.deepspeed if (model := each.argument("model", 1))}
        for call in script.called(*names):
            if _without_engine(call):
                continue
            if any(ast.unparse(each).partition(".")[0] in engines | handed for each in call.node.args[:1]):
                message = (
                    "under ZeRO a rank holds a part of the gradients, or none in .grad: this clips wrongly."
                )
                yield script.hit(
                    call, message, 'Set "gradient_clipping" in the DeepSpeed JSON, and drop the call.'
                )


def _without_engine(call: Call) -> bool:
    """Whether a call stands in the branch for runs without DeepSpeed."""
    return any(
        "deepspeed" in (text := ast.unparse(node.test).lower()) and first_branch is text.startswith("not ")
        for node, first_branch in guards(call)
    )


@rule(
    "script.engine-scheduler",
    severity="wrong",
    raised_by="nobody",
    evidence=f"{_ENGINE} _take_model_step",
    since="0.16.9",
)
def engine_scheduler(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The scheduler is stepped by the engine, and once more by the script."""
    for script, _ in _engines(files):
        owned = {
            ast.unparse(node.targets[0].elts[3])
            for node in script.nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and script.name(node.value.func) == "deepspeed.initialize"
            and isinstance(node.targets[0], ast.Tuple) and len(node.targets[0].elts) == 4
        }  # fmt: skip
        for call in script.methods("step"):
            if call.owner in owned - {"_", "__"} and not list(guards(call)):
                message = f"engine.step() steps {call.owner} already: the learning rate moves twice as fast."
                yield script.hit(call, message, "Drop the call.")


@rule(
    "script.engine-zero-grad", severity="info", raised_by="nobody", evidence=f"{_ENGINE} step", since="0.16.9"
)
def engine_zero_grad(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """zero_grad beside an engine: it does so itself, at the end of the accumulated steps."""
    for script, engines in _engines(files):
        stepped = any(call.owner in engines for call in script.methods("step"))
        for call in script.methods("zero_grad") if stepped else ():
            if any("deepspeed" in ast.unparse(node.test).lower() for node, _ in guards(call)):
                continue  # which may be the other branch's
            message = "the engine zeroes gradients itself; between accumulated steps this call loses them."
            yield script.hit(call, message, "Drop the call.")


@rule(
    "script.pipeline-engine", severity="error", raised_by="deepspeed.initialize", since="0.16.9",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/pipe/engine.py 0.19.8",
)  # fmt: skip
def pipeline_engine(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """forward, backward or step of a pipeline engine: PipelineError, it takes train_batch alone."""
    for script, engines in _engines(files):
        others = script.methods("train_batch")
        for call in script.methods("backward", "step") if _is_pipeline(script) else ():
            if call.owner in engines and (not others or _stand_together(call, others)):
                message = f"{call.owner}.{call.method}() of a pipeline engine raises PipelineError."
                yield script.hit(call, message, f"Call {call.owner}.train_batch(data_iter).")


def _stand_together(call: Call, others: list[Call]) -> bool:
    """Whether no condition is around the call, and train_batch stands in the same function or loop."""
    return not list(guards(call)) and any(call.around[2:] == each.around[2:] for each in others)


def _is_pipeline(script: Script) -> bool:
    """Whether every engine of the script is seen to be made of a PipelineModule."""
    made = [script.bound(call.argument("model", 1)) for call in script.deepspeed]
    return all(
        isinstance(each, ast.Call) and script.name(each.func).endswith(("PipelineModule", "DualPipeVModule"))
        for each in made
    )


@rule(
    "script.engine-backend",
    severity="slow",
    raised_by="nobody",
    evidence="deepspeedai/DeepSpeed:deepspeed/comm/comm.py 0.19.8",
    since="0.16.9",
)
def engine_backend(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A process group of gloo or MPI, which DeepSpeed then takes over."""
    for script, _ in _engines(files):
        for call in script.called("torch.distributed.init_process_group"):
            backend = call.keyword("backend") or (call.node.args[0] if call.node.args else None)
            if isinstance(backend, ast.Constant) and backend.value in ("gloo", "mpi"):
                message = f"DeepSpeed takes the process group over: its traffic goes through {backend.value}."
                yield script.hit(call, message, "Call deepspeed.init_distributed(), or use nccl.")


@rule(
    "script.checkpoint-tag", severity="wrong", raised_by="nobody", since="0.16.9",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py _checkpoint_tag_validation 0.19.8",
)  # fmt: skip
def checkpoint_tag(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A checkpoint's tag that differs from rank to rank: its files are scattered over several folders."""
    for script, engines in _engines(files):
        for call in script.methods("save_checkpoint"):
            tag = call.argument("tag", 1)
            if call.owner in engines and tag is not None and _OWN.search(ast.unparse(tag)):
                message = "the tag holds the rank or the time, so ranks save under different ones; it only warns."
                fix = "Make the tag of the step alone; each rank's file has its own name already."
                yield script.hit(call, message, fix)


_OWN = re.compile(r"\b(?:local_|global_)?rank\b|get_rank\(|time\.time\(|\bnow\(|strftime\(|uuid", re.IGNORECASE)


@rule(
    "script.client-state", severity="error", raised_by="python",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/engine.py load_checkpoint 0.19.8, run",
)  # fmt: skip
def client_state(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What load_checkpoint returns, used as if there were a checkpoint in the first run too."""
    for script, engines in _engines(files):
        for node in script.nodes:
            if not isinstance(node, ast.Assign):
                continue
            path, state, made = _names_of(node)
            call = next((each for each in script.methods("load_checkpoint") if each.node is made), None)
            if call is None or call.owner not in engines or not state:
                continue
            use = _read_at_once(script, call, path, state)
            if use is not None and _is_first_run(script, call):
                method = isinstance(use, ast.Attribute)
                raises = "AttributeError" if method else "TypeError"
                message = (
                    f"the first run has no checkpoint: {call.owner}.load_checkpoint warns and returns None twice, "
                    f"and {ast.unparse(use)} raises {raises}."
                )
                fix = f"Ask `if {state} is not None:` before, and start from 0 otherwise."
                yield Hit(script.path, script.python.at(use), message, fix)


def _names_of(node: ast.Assign) -> tuple[str, str, ast.expr]:
    """What the path and the state of a checkpoint are bound to, and by which call: also `state = load()[1]`."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        return ast.unparse(target.elts[0]), ast.unparse(target.elts[1]), value
    if isinstance(value, ast.Subscript) and ast.unparse(value.slice) == "1" and isinstance(target, ast.Name):
        return "_", target.id, value.value
    return "", "", value


def _is_first_run(script: Script, call: Call) -> bool:
    """Whether a checkpoint is loaded in each run, from the folder that the same program fills."""
    alike = ast.unparse(call.argument("load_dir", 0) or call.node)
    fills = (each.argument("save_dir", 0) for each in script.methods("save_checkpoint"))
    together = any(each.function is call.function for each in script.deepspeed)
    chosen = any(isinstance(each, ast.If | ast.Try | ast.IfExp | ast.While) for each in call.around)
    tag, above = call.argument("tag", 1), lines_of(script.python.text)[: call.node.lineno]
    newest = tag is None or (isinstance(tag, ast.Constant) and tag.value is None)
    asked = any(_ASKS.search(line) for line in above)
    same = any(each is not None and ast.unparse(each) == alike for each in fills)
    return together and newest and same and not chosen and not asked


_ASKS = re.compile(r"exists\(|isfile\(|isdir\(|is_file\(|is_dir\(|listdir\(|glob\(")


def _read_at_once(script: Script, call: Call, path: str, state: str) -> ast.expr | None:
    """The first `state[...]` or `state.get` below the call, where nothing asks whether there is one."""
    nodes = [each for each in ast.walk(call.function or script.python.tree) if hasattr(each, "lineno")]
    below = [each for each in nodes if each.lineno >= call.node.lineno]
    for node in below:
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            asks: ast.expr | None = node.test
        else:
            asks = node if isinstance(node, ast.BoolOp | ast.Compare) else None
        if asks is not None and any(_is(each, path) or _is(each, state) for each in ast.walk(asks)):
            return None
    stored = (each for each in below if _is(each, state) and isinstance(getattr(each, "ctx", None), ast.Store))
    if any(each.lineno > call.node.lineno for each in stored) or any(isinstance(each, ast.Try) for each in nodes):
        return None
    uses = (
        each for each in below
        if isinstance(each, ast.Subscript | ast.Attribute) and ast.unparse(each.value) == state
    )  # fmt: skip
    return min(uses, key=lambda each: (each.lineno, each.col_offset), default=None)


def _is(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and text != "_" and ast.unparse(node) == text


@rule(
    "activation.unused", severity="info", raised_by="nobody", since="0.16.9",
    evidence="deepspeedai/DeepSpeed:deepspeed/runtime/activation_checkpointing/checkpointing.py configure 0.19.8",
)  # fmt: skip
def activation_unused(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """activation_checkpointing beside a script that never calls deepspeed.checkpointing, which alone reads it."""
    config = one_config(plan, files, settings)
    section = config.get("activation_checkpointing") if config is not None else None
    if config is None or not isinstance(section, dict) or not any(section.values()):
        return
    if next(_engines(files), None) and not any("checkpointing" in script.python.text for script in scripts(files)):
        message = "nothing in the scripts here calls deepspeed.checkpointing, so these settings do nothing."
        fix = "Call deepspeed.checkpointing.configure and .checkpoint, or recompute as the model does it."
        yield config.hit("activation_checkpointing", message, fix)
