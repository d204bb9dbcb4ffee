"""Whether a checkpoint of one plan is read under another, as it is or once DeepSpeed has converted it."""

from __future__ import annotations

from dslaunch.planfile import Plan

_RUNTIME = "dslaunch.runtime"
_FORMAT = "--ckpt-format"
_GRID = ("tp", "pp", "vpp", "cp", "ep", "etp")
_CONVERTED_MODES = {
    "universal_checkpoint", "huggingface", "activation_checkpointing", "tensorboard", "csv_monitor", "wandb",
    "comet",
}  # fmt: skip
"""Modes of DeepSpeed that leave the states as plain ZeRO has them."""
_ADAM = {"adam", "adamw"}
"""ds_to_universal carries exp_avg and exp_avg_sq, and no other state of an optimizer."""


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
    if after.engine.name == "deepspeed":
        return "" if zero_of(before) == zero_of(after) == 0 else _deepspeed_fault(zero_of(before))
    if after.engine.name == "megatron":
        return _megatron_fault(before, after)
    return f"a checkpoint of engine {after.engine.name} is read under its own layout only"


def conversion_fault(before: Plan, after: Plan) -> str:
    """Why DeepSpeed's ds_to_universal does not make of what `before` saved what `after` reads; empty: it does.

    Tried with other replicas of AdamW's states on 0.19.8 (tests/real/test_universal.py). ZeRO-3 reads the number
    of steps from where ZeRO-3 alone has written it (deepspeed/runtime/zero/stage3.py).
    """
    if after.engine.name != "deepspeed" or after.program.module == _RUNTIME:
        return "it is no checkpoint that a script of DeepSpeed saved"
    saved, read = zero_of(before), zero_of(after)
    if 0 in (saved, read) or (saved == 3) != (read == 3):
        return f"DeepSpeed converts ZeRO-1 and 2 into one another, and 3 for itself, not {saved} into {read}"
    if any(size > 1 for plan in (before, after) for grid in _grids(plan).values() for size in grid[1:]):
        return "DeepSpeed's conversion has been tried with other replicas alone, at tp, pp, cp and ep 1"
    if any(each.offload.startswith("nvme") for each in before.components.values()):
        return "optimizer states on NVMe are not in the files that DeepSpeed converts"
    if others := sorted({*before.engine.modes, *after.engine.modes} - _CONVERTED_MODES):
        return f"DeepSpeed's conversion has not been tried with {', '.join(others)}"
    if any(each.get("experts") for each in before.model["components"].values()):
        return "states of experts are not in the files that DeepSpeed converts"
    kind = str(before.engine.extra.get("optimizer", {}).get("type", before.training.optimizer))
    return "" if kind.lower() in _ADAM else f"DeepSpeed converts Adam's states, and the optimizer is {kind}"


def zero_of(plan: Plan) -> int:
    """The stage of the components that train."""
    return max(each.zero for each in plan.components.values() if each.trainable)


def _grids(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: (each.dp, *(getattr(each, size) for size in _GRID)) for name, each in plan.components.items()}


def _deepspeed_fault(zero: int) -> str:
    return (
        f"a script's checkpoint of ZeRO-{zero} is read by as many ranks, of the same stage, as saved it. Train "
        "with dslaunch.runtime, whose checkpoints know no layout, or convert it with DeepSpeed's "
        "ds_to_universal.py and launch anew with checkpoint.load=FOLDER checkpoint.universal=true"
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
