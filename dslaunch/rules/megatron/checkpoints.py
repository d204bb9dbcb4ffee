"""What Megatron-LM says of saving and loading checkpoints, as far as a command line tells."""

from __future__ import annotations

from dslaunch.rules.megatron.demands import Demand, demands
from dslaunch.rules.megatron.run import Run

_SAVE, _LOAD = "megatron/training/checkpointing.py save_checkpoint", "--load"
_TYPE, _LOCAL_DIR = "--non-persistent-ckpt-type", "--non-persistent-local-ckpt-dir"
_EVERY = "--non-persistent-save-interval"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def checkpoint_format(run: Run) -> str:
    """How the run saves."""
    return run.text("--ckpt-format", "torch_dist")


def _not_positive(run: Run, flag: str) -> bool:
    return run.on("--save") and run.on(flag) and run.size(flag) < 1


def _uneven(run: Run) -> bool:
    """Whether no save is kept at the step at which one is to be."""
    retain, every = "--save-retain-interval", "--save-interval"
    if not (run.on("--save") and run.on(retain) and run.on(every)):
        return False
    kept, saved = run.size(retain), run.size(every)
    return kept > 0 and saved > 0 and bool(kept % saved)


_CHECKPOINT = (
    Demand(
        "--ckpt-format", lambda r: checkpoint_format(r) == "torch_dcp" and not r.on("--use-torch-fsdp2"),
        "--ckpt-format torch_dcp without --use-torch-fsdp2", "Use torch_dist.",
    ),
    Demand(
        "--ckpt-format", lambda r: checkpoint_format(r) == "torch_dcp" and (r.tp > 1 or r.pp > 1),
        "--ckpt-format torch_dcp with tensor or pipeline parallelism", "Use torch_dist.",
    ),
    Demand(
        "--ckpt-format", lambda r: checkpoint_format(r) == "fsdp_dtensor" and not r.on("--use-megatron-fsdp"),
        "--ckpt-format fsdp_dtensor without --use-megatron-fsdp", "Use torch_dist.",
    ),
    Demand(
        "--save", lambda r: r.on("--save") and not r.on("--save-interval"),
        "--save without --save-interval", "Add --save-interval.",
    ),
    Demand(
        "--save-retain-interval", _uneven,
        "--save-retain-interval is no multiple of --save-interval", "Use a multiple.", since="0.14.0",
    ),
    Demand(
        "--disable-gloo-process-groups",
        lambda r: r.on("--disable-gloo-process-groups") and r.on("--use-distributed-optimizer")
        and checkpoint_format(r) == "torch",
        "--disable-gloo-process-groups with --use-distributed-optimizer and --ckpt-format torch",
        "Use --ckpt-format torch_dist.",
    ),
    Demand(
        "--load-main-params-from-ckpt",
        lambda r: r.on("--load-main-params-from-ckpt") and not r.on("--no-load-optim"),
        "--load-main-params-from-ckpt without --no-load-optim", "Add --no-load-optim.",
    ),
    Demand(
        "--non-persistent-ckpt-type",
        lambda r: r.text("--non-persistent-ckpt-type") == "local" and not r.on("--non-persistent-local-ckpt-dir"),
        "--non-persistent-ckpt-type local without --non-persistent-local-ckpt-dir", "Name the folder.",
    ),
    Demand(
        "--save-interval", lambda r: _not_positive(r, "--save-interval"),
        "--save-interval below 1", "Write after how many steps to save.", since="0.14.0",
    ),
    Demand(
        "--save-retain-interval", lambda r: _not_positive(r, "--save-retain-interval"),
        "--save-retain-interval below 1", "Write a multiple of --save-interval.", since="0.14.0",
    ),
    Demand(
        _TYPE, lambda r: r.text(_TYPE) == "in_memory",
        f"{_TYPE} in_memory passes the parser and is not made", "Use local or global.",
    ),
    Demand(
        "--replication", lambda r: r.on("--replication") and not r.on("--replication-jump"),
        "--replication without --replication-jump", "Say how far apart the ranks stand that keep a copy.",
    ),
    Demand(
        "--replication", lambda r: r.on("--replication") and r.text(_TYPE) != "local",
        f"--replication without {_TYPE} local", f"Add {_TYPE} local and {_LOCAL_DIR}, or drop it.",
    ),
    Demand(
        "--use-legacy-models", lambda r: r.on("--use-legacy-models") and checkpoint_format(r) != "torch",
        "--use-legacy-models without --ckpt-format torch", "Add --ckpt-format torch.", before="0.18.0",
    ),
    Demand(
        "--distrib-optim-fully-reshardable-mem-efficient",
        lambda r: r.on("--disable-gloo-process-groups") and r.on("--use-distributed-optimizer")
        and r.on(_RESHARDABLE) and r.on("--distrib-optim-fully-reshardable-mem-efficient"),
        "--distrib-optim-fully-reshardable-mem-efficient with --disable-gloo-process-groups",
        "Keep one of them.", since="0.15.0",
    ),
)  # fmt: skip
demands("megatron.checkpoint", "Checkpoint settings that Megatron stops at.", _CHECKPOINT)

_SAVING = (
    Demand(
        "--async-save",
        lambda r: r.on("--async-save") and r.on("--save") and checkpoint_format(r) == "torch",
        "--async-save with --ckpt-format torch", "Use --ckpt-format torch_dist.",
    ),
    Demand(
        "--async-save",
        lambda r: r.on("--async-save") and r.on("--save") and _kept_asynchronous(r)
        and checkpoint_format(r) in ("torch_dcp", "fsdp_dtensor"),
        "--async-save with a --ckpt-format other than torch_dist", "Drop --async-save.",
    ),
    Demand(
        _EVERY, lambda r: r.on("--save") and r.size(_EVERY, 0) > 0 and not r.on(_TYPE),
        f"{_EVERY} without {_TYPE}", f"Add {_TYPE} global.",
    ),
    Demand(
        _EVERY,
        lambda r: r.on("--save") and r.size(_EVERY, 0) > 0 and r.text(_TYPE) == "global"
        and checkpoint_format(r) == "torch",
        f"{_TYPE} global with --ckpt-format torch", "Use --ckpt-format torch_dist.",
    ),
    Demand(
        _RESHARDABLE,
        lambda r: r.on(_RESHARDABLE) and r.on("--use-distributed-optimizer") and r.on("--save")
        and r.size(_EVERY, 0) > 0 and r.text(_TYPE) == "local",
        f"{_TYPE} local with {_RESHARDABLE}", f"Drop {_RESHARDABLE}.", since="0.15.0",
    ),
    Demand(
        "--moe-use-upcycling",
        lambda r: r.on("--moe-use-upcycling") and r.on("--save") and r.on(_LOAD)
        and r.text(_LOAD) == r.text("--save"),
        "--moe-use-upcycling that reads and writes the same folder: it wants a new one",
        "Name a new folder in --save.", since="0.13.0",
    ),
)  # fmt: skip


def _kept_asynchronous(run: Run) -> bool:
    """Whether --async-save stays on: since core 0.16.0 only beside a persistent worker."""
    return not run.between("0.16.0", "") or run.on("--use-persistent-ckpt-worker")


demands(
    "megatron.saving", "A checkpoint that Megatron refuses to write, hours after the start.", _SAVING,
    evidence=f"NVIDIA/Megatron-LM:{_SAVE} and training.py setup_model_and_optimizer at core_v0.12.3 to "
    "core_v0.19.0; save_checkpoint of core_v0.16.1, run", stops="the first save raises",
)  # fmt: skip
