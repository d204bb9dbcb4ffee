"""Tensor, sequence and expert parallelism by DeepSpeed, and its compiler."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.errors import listed, nearest
from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit, hit

_GROUPS = "deepspeed/__init__.py initialize, utils/groups.py, runtime/engine.py 0.19.8, run"
_FOLD = "deepspeed/module_inject/auto_ep_folding.py, auto_ep_config.py 0.19.8, run"
_COMPILE = "deepspeed/runtime/engine.py compile, compile/init_z3.py 0.19.8"
_TP = "tensor_parallel.autotp_size"


@config_rule("autotp.world", severity="error", raised_by="deepspeed.initialize", evidence=_GROUPS)
def autotp_world(config: Config) -> Iterator[Hit]:
    """An AutoTP size that doesn't fit the ranks."""
    size = config.number(_TP)
    if size is not None and size < 0:
        yield config.hit(
            _TP,
            f"autotp_size {size:g} counts as off.",
            "Write 0 or a size.",
            severity="wrong",
            raised_by="nobody",
        )
    if size is None or size < 2 or config.world is None:
        return
    if size > config.world:
        yield config.hit(
            _TP,
            f"autotp_size {size:g} for {config.world} ranks: the mesh asserts.",
            f"Use at most {config.world}.",
        )
    elif config.world % size:
        message = f"autotp_size {size:g} doesn't divide {config.world} ranks: the last ones are in no group."
        yield config.hit(
            _TP, message, "Use a size that divides the ranks.", severity="hang", raised_by="nobody"
        )


@config_rule("autotp.sizes", severity="error", raised_by="deepspeed.initialize", evidence=_GROUPS)
def autotp_sizes(config: Config) -> Iterator[Hit]:
    """Two sizes of tensor parallelism, or a loss without the head that it is for."""
    size, other = config.number(_TP), config.number("tensor_parallel.tp.tp_size")
    if size is not None and size > 1 and other is not None and other not in (1, size):
        message = f"tp.tp_size {other:g} and autotp_size {size:g}: DeepSpeed raises ValueError."
        yield config.hit("tensor_parallel.tp.tp_size", message, "Delete tp.tp_size.")
    backend, head = "tensor_parallel.vocab_parallel_ce_backend", "tensor_parallel.vocab_parallel_lm_head"
    if config.get(backend) == "liger" and config.off(head):
        message = "vocab_parallel_ce_backend liger without a vocabulary-parallel head: ValueError."
        yield config.hit(
            backend, message, "Write torch, or delete vocab_parallel_lm_head.", raised_by="nobody"
        )


@config_rule(
    "autotp.partition", severity="error", raised_by="deepspeed.initialize",
    evidence="deepspeed/module_inject/autotp_config.py AutoTPConfig.from_dict 0.19.8, run",
)  # fmt: skip
def autotp_partition(config: Config) -> Iterator[Hit]:
    """A layer of partition_config that is cut in a way AutoTP doesn't know."""
    specs = config.get("tensor_parallel.partition_config.layer_specs")
    size = config.number(_TP)
    for at, spec in enumerate(specs if isinstance(specs, list) and size is not None and size > 1 else ()):
        kind = spec.get("partition_type", "column") if isinstance(spec, dict) else "column"
        if isinstance(kind, str) and kind.lower() not in _CUTS:
            path = ("tensor_parallel", "partition_config", "layer_specs", at, "partition_type")
            message = f"partition_type {kind!r} is none of {listed(_CUTS)}: ValueError.{nearest(kind, _CUTS)}"
            yield hit(config.file, path, message, f"Write one of {listed(_CUTS)}.")


_CUTS = ("column", "row", "skip")


@config_rule(
    "autotp.batch", severity="info", evidence="deepspeed/runtime/config.py, runtime/engine.py 0.19.8, run"
)
def autotp_batch(config: Config) -> Iterator[Hit]:
    """train_batch_size under AutoTP, which counts each sample once per tensor-parallel rank."""
    size = config.number(_TP)
    train = config.number("train_batch_size")
    if config.plan is None and size is not None and size > 1 and train is not None:
        message = (
            f"under autotp_size {size:g} train_batch_size {train:g} is {train / size:g} "
            "different samples a step."
        )
        yield config.hit("train_batch_size", message, "Set learning rate and steps by the smaller number.")


@config_rule("ulysses.mesh", severity="error", raised_by="deepspeed.initialize", evidence=_GROUPS)
def ulysses(config: Config) -> Iterator[Hit]:
    """A sequence-parallel size that makes no mesh, or the wrong one."""
    key = "sequence_parallel_size"
    size, data, world = config.number(key), config.number("data_parallel_size"), config.world
    if size == 0:
        message = f"{key} 0: DeepSpeed divides the ranks by it, and raises ZeroDivisionError."
        yield config.hit(key, message, "Write 1, or leave it out.")
    elif size is not None and size < 0:
        message = f"{key} {size:g}: DeepSpeed divides the ranks by it, and asserts that the batch is above 0."
        yield config.hit(key, message, "Write 1, or leave it out.")
    yield from _no_axis(config)
    if size is None or size < 2:
        return
    if data is None and config.plan is None:
        message = (
            f"{key} {size:g} without data_parallel_size: no mesh is built, though the batch is divided by it."
        )
        yield config.hit(
            key, message, "Give data_parallel_size too, or pass an mpu.", severity="wrong", raised_by="nobody"
        )
    elif data is not None and data >= 1 and world is not None and data * size != world:
        message = (
            f"data_parallel_size {data:g} * {key} {size:g} = {data * size:g}, but there are {world} ranks"
        )
        fix = f"Use sizes whose product is {world}."
        if data * size > world:
            yield config.hit(key, f"{message}: RuntimeError.", fix)
        else:
            message += ": the others are in no group"
            yield config.hit(key, f"{message}.", fix, severity="wrong", raised_by="nobody")


def _no_axis(config: Config) -> Iterator[Hit]:
    """Sizes that torch makes no mesh of, where both stand."""
    sizes = {name: config.get(name) for name in ("data_parallel_size", "sequence_parallel_size")}
    numbers = all(isinstance(size, int | float) for size in sizes.values())
    for name, size in sizes.items() if numbers else ():
        whole = not isinstance(size, bool) and float(size).is_integer()
        if not whole or (size < 1 and name == "data_parallel_size"):
            message = f"{name} is {shown(size)}, and no axis of a mesh of ranks: torch raises."
            yield config.hit(name, message, "Write whole numbers from 1 on, whose product is the number of ranks.")


_EP = "expert_parallel"


@config_rule(
    "experts.sizes", severity="error", raised_by="deepspeed.initialize", since="0.19.2", evidence=_FOLD
)
def expert_sizes(config: Config) -> Iterator[Hit]:
    """Expert-parallel sizes that don't fit the ranks or the other degrees."""
    if config.get(f"{_EP}.enabled") is not True:
        return
    inner = config.number(f"{_EP}.expert_tensor_parallel_size")
    if inner not in (None, 1):
        message = f"expert_tensor_parallel_size {inner:g}: DeepSpeed raises ValueError, it isn't there yet."
        yield config.hit(f"{_EP}.expert_tensor_parallel_size", message, "Write 1.")
        return
    size, key = config.number(f"{_EP}.autoep_size") or 1, f"{_EP}.autoep_size"
    if config.world is not None and (config.world // config.stages) % size:
        message = f"autoep_size {size:g} doesn't divide {config.world // config.stages} ranks: ValueError."
        yield config.hit(key, message, "Use a size that divides the ranks of a stage.")
    elif (config.number(_TP) or 1) > 1:
        yield from _folded(config, size)


def _folded(config: Config, size: float) -> Iterator[Hit]:
    """AutoEP and AutoTP on the same ranks."""
    blockers = {
        "autoep_size 1": size == 1,
        "a pipeline": config.stages > 1,
        "sequence_parallel_size above 1": (config.number("sequence_parallel_size") or 1) > 1,
        "offload": config.offload("optimizer") != "none" or config.offload("param") != "none",
        "compile.deepcompile": config.on("compile.deepcompile"),
        "async_split_plan": config.get(f"{_EP}.async_split_plan") is True,
        "use_data_before_expert_parallelism": config.get("use_data_before_expert_parallelism") is True,
    }
    for blocker in (name for name, present in blockers.items() if present):
        message = f"expert_parallel with autotp_size above 1 and {blocker}: DeepSpeed raises ValueError."
        yield config.hit(f"{_EP}.autoep_size", message, f"Go without {blocker}, or write autotp_size 1.")
        return


@config_rule(
    "experts.zero3",
    severity="error",
    since="0.19.2",
    evidence="deepspeed/runtime/engine.py _validate_zero3_moe_compatibility 0.19.8",
)
def expert_zero3(config: Config) -> Iterator[Hit]:
    """AutoEP at ZeRO-3 with what it doesn't support yet."""
    if config.stage != 3 or config.get(f"{_EP}.enabled") is not True:
        return
    blockers = {
        "sequence_parallel_size": (config.number("sequence_parallel_size") or 1) > 1,
        f"{ZERO}.zero_quantized_gradients": config.on(f"{ZERO}.zero_quantized_gradients"),
        f"{ZERO}.zero_hpz_partition_size": (config.number(f"{ZERO}.zero_hpz_partition_size") or 1) > 1,
    }
    for key in (key for key, present in blockers.items() if present):
        yield config.hit(key, f"expert_parallel at ZeRO stage 3 with {key}: AssertionError.", "Leave it out.")


@config_rule("compile.options", severity="error", evidence=_COMPILE)
def compiled(config: Config) -> Iterator[Hit]:
    """Options of DeepSpeed's compiler that exclude each other: engine.compile() raises."""
    passes = config.get("compile.passes")
    others = [name for name in ("autosp", "z1", "z3") if isinstance(passes, list) and name in passes]
    if isinstance(passes, list) and "autotp" in passes and others:
        message = f"the pass autotp with {', '.join(others)}: NotImplementedError."
        yield config.hit("compile.passes", message, "Use autotp alone.")
    activation, states = config.on("compile.offload_activation"), config.on("compile.offload_opt_states")
    if activation and (states or config.on("compile.offload_parameters")):
        message = "offload_activation with offload_parameters or offload_opt_states: ValueError."
        yield config.hit("compile.offload_activation", message, "Offload one of them.")
    if states and config.sharded and config.offload("optimizer") != "none":
        message = "compile.offload_opt_states with zero_optimization.offload_optimizer: ValueError."
        yield config.hit("compile.offload_opt_states", message, "Offload the states in one place.")
    if config.on("compile.autoep_non_moe"):
        yield from _non_moe(config)


def _non_moe(config: Config) -> Iterator[Hit]:
    blockers = {
        "compile.deepcompile": config.on("compile.deepcompile"),
        "comm_backend deepep": config.get(f"{_EP}.comm_backend") == "deepep",
        "AutoTP": (config.number(_TP) or 1) > 1,
        "sequence parallelism": (config.number("sequence_parallel_size") or 1) > 1,
        "a pipeline": config.stages > 1,
        "ZeRO stage 3": config.stage == 3,
        "offload": config.offload("optimizer") != "none" or config.offload("param") != "none",
    }
    for blocker in (name for name, present in blockers.items() if present):
        yield config.hit(
            "compile.autoep_non_moe", f"autoep_non_moe with {blocker}: ValueError.", f"Go without {blocker}."
        )
        return


@config_rule("compile.call", severity="info", evidence=_COMPILE)
def compile_call(config: Config) -> Iterator[Hit]:
    """deepcompile, which does nothing at stage 0 or without engine.compile()."""
    if config.on("compile.deepcompile"):
        why = (
            "falls back to torch's compiler at ZeRO stage 0"
            if config.stage == 0
            else "needs torch 2.6 and CUDA"
        )
        message = f"deepcompile {why}, and runs only where the script calls engine.compile()."
        yield config.hit("compile.deepcompile", message, "Call engine.compile() after deepspeed.initialize.")
