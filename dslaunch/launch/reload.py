"""Whether a checkpoint of one plan is read under another."""

from __future__ import annotations

from dslaunch.planfile import Plan

_RUNTIME = "dslaunch.runtime"
_FORMAT = "--ckpt-format"
_GRID = ("tp", "pp", "vpp", "cp", "ep", "etp")


def reload_fault(before: Plan, after: Plan) -> str:
    """Why the program of `after` does not read what that of `before` saved; empty where it does.

    dslaunch.runtime reads its checkpoints under any layout. A script saves by itself: DDP's states and FSDP2's
    distributed checkpoints are read by any number of ranks; DeepSpeed's ZeRO states are a file of each rank, and
    another number of ranks refuses them (deepspeed/runtime/zero/stage_1_and_2.py, _rigid_load_state_dict, 0.19.8).
    Megatron's torch_dist is read with other replicas and the same tp, pp, cp and ep
    (megatron/training/arguments.py, --dist-ckpt-optim-fully-reshardable, core 0.14).
    """
    if after.program.module == _RUNTIME or _grids(before) == _grids(after):
        return ""
    if after.engine.name == "torch":
        return ""
    zero = max(each.zero for each in before.components.values() if each.trainable)
    if after.engine.name == "deepspeed":
        return "" if zero == 0 else _deepspeed_fault(zero)
    if after.engine.name == "megatron":
        return _megatron_fault(before, after)
    return f"a checkpoint of engine {after.engine.name} is read under its own layout only"


def _grids(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: (each.dp, *(getattr(each, size) for size in _GRID)) for name, each in plan.components.items()}


def _deepspeed_fault(zero: int) -> str:
    return (
        f"a script's checkpoint of ZeRO-{zero} is read by as many ranks as saved it. Train with dslaunch.runtime, "
        "whose checkpoints know no layout, or convert it with DeepSpeed's ds_to_universal.py and launch anew with "
        "checkpoint.load=FOLDER checkpoint.universal=true"
    )


def _megatron_fault(before: Plan, after: Plan) -> str:
    """Megatron reads torch_dist, its default, with other replicas; the other sizes must stay."""
    chosen = str(after.engine.extra.get(_FORMAT.removeprefix("--"), "torch_dist"))
    if chosen != "torch_dist":
        return f"Megatron reads a checkpoint under another layout with {_FORMAT} torch_dist; it is {chosen}"
    kept = {name: grid[1:] for name, grid in _grids(before).items()}
    if kept != {name: grid[1:] for name, grid in _grids(after).items()}:
        return "Megatron's torch_dist is read with other replicas, but with the tp, pp, cp and ep that saved it"
    return ""
