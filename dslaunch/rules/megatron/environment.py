"""What Megatron wants of the environment, and flags that do nothing without another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.demands import ARGUMENTS, RUN
from dslaunch.rules.megatron.forks import of_fork
from dslaunch.rules.megatron.run import Run, runs, stock_runs, where_told
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_CONNECTIONS, _SEQUENCE = "CUDA_DEVICE_MAX_CONNECTIONS", "--sequence-parallel"


@rule(
    "megatron.connections", severity="error", raised_by="megatron", framework="megatron",
    evidence=f"{ARGUMENTS} at {RUN}; validate_args of Megatron-DeepSpeed at 4efb479, run",
)  # fmt: skip
def connections(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Tensor or context parallelism before Blackwell without CUDA_DEVICE_MAX_CONNECTIONS=1: Megatron stops."""
    for run in runs(files, settings):
        yield from where_told(_several(run, files))


def _several(run: Run, files: FileSet) -> Iterator[Hit]:
    value = _environment(run, files)
    if value == "1" or not (_of_deepspeed_wants_one(run) if run.is_deepspeed else _wants_one(run)):
        return
    why = "with tensor or context parallelism Megatron wants 1 on GPUs before Blackwell"
    flags: tuple[str, ...] = ("--tensor-model-parallel-size", "--context-parallel-size")
    if run.is_deepspeed:
        why = "with sequence parallelism, or without --deepspeed, Megatron-DeepSpeed wants 1"
        flags = (_SEQUENCE,)
    fix = f"export {_CONNECTIONS}=1 before the launch."
    if value is None and run.program and not (run.is_deepspeed and not run.on("--deepspeed")):
        found = run.hit(flags, f"nothing here sets {_CONNECTIONS}; {why}.", fix)
        yield Hit(found.name, found.at, found.message, fix, severity="info")
    elif value is not None:
        yield run.hit(flags, f"{_CONNECTIONS} is {value}; {why}, and stops at start-up.", fix)


def _environment(run: Run, files: FileSet) -> str | None:
    """The value in the same script, or in a file of assignments beside it."""
    own = run.environment(_CONNECTIONS)
    if own is not None:
        return own
    for file in files.of("env", "shell"):
        for each in file.assignments:
            if each.name == _CONNECTIONS:
                return each.value
    return None


def _wants_one(run: Run) -> bool:
    free = run.on("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
    free = free or run.on("--overlap-moe-expert-parallel-comm")
    return not free and (run.tp > 1 or run.cp > 1)


def _of_deepspeed_wants_one(run: Run) -> bool:
    """Whether Megatron-DeepSpeed needs kernels in the host's order: where it cuts sequences, or overlaps."""
    if run.arguments.has("--use-dataset-only"):
        return False
    if run.on(_SEQUENCE) and run.tp > 1:
        return True
    return not run.on("--deepspeed") and not run.on("--no-async-tensor-model-parallel-allreduce")


_WITHOUT: Mapping[str, tuple[Callable[[Run], bool], str]] = {
    "--num-query-groups": (lambda r: not r.on("--group-query-attention"), "--group-query-attention"),
    "--sequence-parallel": (lambda r: r.tp == 1, "a --tensor-model-parallel-size above 1"),
    "--recompute-num-layers": (
        lambda r: not r.on("--recompute-granularity", "--recompute-activations"), "--recompute-granularity",
    ),
    "--recompute-method": (
        lambda r: not r.on("--recompute-granularity", "--recompute-activations"), "--recompute-granularity",
    ),
    "--recompute-modules": (
        lambda r: not r.on("--recompute-granularity", "--recompute-activations"), "--recompute-granularity",
    ),
    "--fp8-recipe": (lambda r: not r.on("--fp8-format"), "--fp8-format"),
    "--fp8-amax-history-len": (lambda r: not r.on("--fp8-format"), "--fp8-format"),
    "--fp8-amax-compute-algo": (lambda r: not r.on("--fp8-format"), "--fp8-format"),
    "--moe-grouped-gemm": (lambda r: r.experts == 0, "--num-experts"),
    "--moe-router-topk": (lambda r: r.experts == 0, "--num-experts"),
    "--moe-token-dispatcher-type": (lambda r: r.experts == 0, "--num-experts"),
    "--replication-jump": (lambda r: not r.on("--replication"), "--replication"),
    **dict.fromkeys(
        ("--finetune", "--ckpt-step", "--exit-on-missing-checkpoint"),
        (lambda r: not r.on("--load", "--pretrained-checkpoint"), "--load"),
    ),
    "--save-interval": (lambda r: r.program.startswith("pretrain") and not r.on("--save"), "--save"),
    "--async-save": (
        lambda r: r.between("0.16.0", "") and r.text("--ckpt-format", "torch_dist") != "torch"
        and not r.on("--use-persistent-ckpt-worker"), "--use-persistent-ckpt-worker",
    ),
    "--non-persistent-ckpt-type": (
        lambda r: not r.on("--non-persistent-save-interval"), "--non-persistent-save-interval",
    ),
    "--non-persistent-save-interval": (lambda r: not r.on("--save"), "--save"),
}  # fmt: skip


@rule(
    "megatron.ignored-flag", severity="wrong", raised_by="nobody", evidence=f"{ARGUMENTS} at {RUN}",
    framework="megatron",
)  # fmt: skip
def ignored(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A flag that does nothing without another one."""
    for run in stock_runs(files, settings):
        for flag in _WITHOUT:
            yield from of_fork(run, where_told(_without(run, flag)))


def _without(run: Run, flag: str) -> Iterator[Hit]:
    useless, needs = _WITHOUT[flag]
    if run.arguments.has(flag) and useless(run):
        message = f"{flag} without {needs}: Megatron passes it over."
        yield run.hit(flag, message, f"Add {needs}, or take {flag} out.")


@rule(
    "megatron.fsdp-strategy", severity="memory", raised_by="nobody", framework="megatron", until="0.17.1",
    evidence="NVIDIA/Megatron-LM:megatron/training/arguments.py --data-parallel-sharding-strategy: no_shard "
    "at core_v0.12.0 to core_v0.17.1, optim_grads_params from core_v0.18.0",
)  # fmt: skip
def fsdp_strategy(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Megatron's FSDP without a sharding strategy: nothing is sharded."""
    for run in stock_runs(files, settings):
        yield from where_told(_unsharded(run))


def _unsharded(run: Run) -> Iterator[Hit]:
    flags, strategy = ("--use-megatron-fsdp", "--use-custom-fsdp"), "--data-parallel-sharding-strategy"
    if run.version and run.on(*flags) and run.text(strategy, "no_shard") == "no_shard":
        message = f"FSDP without a {strategy}: every rank keeps everything."
        yield run.hit(flags, message, f"Add {strategy} optim_grads_params.")


@rule(
    "megatron.expert-sequence-parallel", severity="error", raised_by="megatron", framework="megatron",
    evidence="NVIDIA/Megatron-LM:megatron/core/transformer/moe/moe_layer.py forward at core_v0.12.3 to "
    "core_v0.19.0",
)  # fmt: skip
def expert_sequence_parallel(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Experts under tensor parallelism without sequence parallelism; its first forward pass raises."""
    for run in stock_runs(files, settings):
        yield from where_told(_uncut_experts(run))


def _uncut_experts(run: Run) -> Iterator[Hit]:
    if run.trains and run.experts and run.tp > 1 and not run.on("--sequence-parallel"):
        message = "experts and tensor parallelism without --sequence-parallel; the first step raises."
        yield run.hit("--num-experts", message, "Add --sequence-parallel.")
