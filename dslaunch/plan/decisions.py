"""The parts of a plan that are taken over from the configuration: training, cluster, program, files."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.base import Engine
from dslaunch.planfile import ClusterPlan, FilesPlan, LauncherPlan, ProgramPlan, TrainingPlan
from dslaunch.schema.config import RunConfig

RUNTIME = "dslaunch.runtime"


def training_plan(config: RunConfig, grad_accum_dtype: str) -> TrainingPlan:
    """What decides convergence."""
    training, optimizer = config.training, config.training.optimizer
    return TrainingPlan(
        global_batch=training.global_batch,
        seq_len=training.seq_len,
        precision=training.precision,
        grad_accum_dtype=grad_accum_dtype,
        steps=training.steps,
        seed=training.seed,
        clip=training.clip,
        schedule=training.schedule,
        overlap_comm=training.overlap_comm,
        sequence_parallel=training.sequence_parallel,
        optimizer=optimizer.name,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        warmup_steps=optimizer.warmup_steps,
        lr_schedule=optimizer.schedule,
        min_lr=optimizer.min_lr,
    )


def what_runs(config: RunConfig, engine: Engine) -> tuple[ClusterPlan, dict[str, Any]]:
    """The cluster, and the plan's fields `program`, `launcher` and `files`."""
    cluster, launcher = config.cluster, config.launcher
    return (
        ClusterPlan(
            gpu=cluster.gpu.name,
            accelerator=cluster.gpu.accelerator,
            nodes=cluster.node_count,
            gpus_per_node=cluster.slots,
            local=cluster.local,
            hosts=cluster.hosts,
        ),
        {
            "program": _program(config, engine),
            "launcher": LauncherPlan(
                name=launcher.name,
                python=launcher.python,
                hostfile=launcher.hostfile,
                master_port=launcher.master_port or 0,
                confirm_above=launcher.confirm_above,
                timeout_minutes=launcher.timeout_minutes,
                pass_env=launcher.pass_env,
            ),
            "files": FilesPlan(
                data_path=config.data.path,
                tokenizer=config.data.tokenizer,
                weights=config.model.weights,
                checkpoint_dir=config.checkpoint.dir,
                checkpoint_every=config.checkpoint.every,
                checkpoint_load=config.checkpoint.load,
            ),
        },
    )


def _program(config: RunConfig, engine: Engine) -> ProgramPlan:
    """The user's script or module; dslaunch.runtime where the engine is ours and nothing else is asked for."""
    if config.script:
        return ProgramPlan(script=config.script, args=config.script_args)
    module = config.module or (RUNTIME if engine.name == "native" else "")
    if module == RUNTIME:
        return ProgramPlan(module=module, args=("--plan", "{plan}", *config.script_args))
    return ProgramPlan(module=module, args=config.script_args)
