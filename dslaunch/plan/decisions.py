"""The parts of a plan that are taken over from the configuration: training, cluster, program, files."""

from __future__ import annotations

from typing import Any

from dslaunch.engines.base import Engine
from dslaunch.hardware.topology import tensor_domain
from dslaunch.plan.placement import placement
from dslaunch.planfile import ClusterPlan, FilesPlan, LauncherPlan, ProgramPlan, SupervisionPlan, TrainingPlan
from dslaunch.schema.config import RunConfig

RUNTIME = "dslaunch.runtime"


def training_plan(config: RunConfig, grad_accum_dtype: str, vpp: int) -> TrainingPlan:
    """What decides convergence.

    Args:
        vpp: virtual stages per rank of the trunk.
    """
    training, optimizer = config.training, config.training.optimizer
    return TrainingPlan(
        global_batch=training.global_batch,
        seq_len=training.seq_len,
        precision=training.precision,
        grad_accum_dtype=grad_accum_dtype,
        steps=training.steps,
        seed=training.seed,
        clip=training.clip,
        schedule=training.order(vpp),
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
        lr_decay_steps=optimizer.decay_steps or 0,
        macro_batches=training.macro_batches,
        lr_decay_shape=optimizer.decay_shape or "linear" if optimizer.schedule == "wsd" else "",
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
            nvlink_domain=tensor_domain(cluster) if cluster.node.nvlink_domain > 1 else 1,
            slots=cluster.unequal,
            switches=cluster.switches,
            kinds=tuple(kind.nodes for kind in cluster.kinds),
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
                continuations=launcher.slurm.continuations,
                runner=launcher.runner,
                transport=launcher.transport,
                include=launcher.include,
                exclude=launcher.exclude,
                hosts_command=launcher.hosts_command,
                subnet=launcher.subnet,
                connections=launcher.connections,
                lost_after_s=launcher.lost_after_s,
                placement=placement(config),
                stage_from=launcher.stage.source,
                stage_to=launcher.stage.to,
                stage_exclude=launcher.stage.exclude if launcher.stage.to else (),
                bind_cpus=launcher.bind_cpus,
            ),
            "files": FilesPlan(
                data_path=config.data.path,
                data_workers=config.data.workers,
                tokenizer=config.data.tokenizer,
                weights=config.model.weights,
                checkpoint_dir=config.checkpoint.dir,
                checkpoint_every=config.checkpoint.every if isinstance(config.checkpoint.every, int) else 0,
                checkpoint_async=config.checkpoint.in_background,
                checkpoint_keep=config.checkpoint.keep,
                checkpoint_load=config.checkpoint.load,
            ),
            "supervision": _supervision(config, engine),
        },
    )


def _supervision(config: RunConfig, engine: Engine) -> SupervisionPlan:
    """Restarts begin at the newest checkpoint; without any, each would repeat the whole run."""
    restart, watchdog = config.restart, config.watchdog
    reports_steps = _program(config, engine).module == RUNTIME
    start = watchdog.start_minutes
    return SupervisionPlan(
        restart_max=restart.max if restart.max is not None else 3 if config.checkpoint.every else 0,
        restart_wait_s=restart.wait_s,
        restart_actions={str(cause): str(action) for cause, action in restart.actions.items()},
        spares=restart.spares,
        elastic_min_nodes=restart.min_nodes if restart.elastic else 0,
        watchdog_minutes=watchdog.minutes,
        watchdog_start_minutes=start if start is not None else 60.0 if reports_steps else 0.0,
        min_speed=watchdog.min_speed,
        node_mtbf_hours=config.cluster.mtbf_hours,
        saving_breaches=_breaches(config, "checkpoint"),
        stopping_breaches=_breaches(config, "stop"),
        webhook=config.notify.webhook,
        prometheus_dir=config.notify.prometheus_dir,
        wandb=config.notify.wandb,
        wandb_mode=config.notify.wandb_mode,
    )


def _breaches(config: RunConfig, action: str) -> tuple[str, ...]:
    """The thresholds at whose breach that is done."""
    return tuple(sorted(name for name, does in config.notify.breach.items() if does == action))


def runtime_faults(config: RunConfig, engine: Engine) -> list[str]:
    """What dslaunch.runtime alone does with data, checkpoints and speed."""
    checkpoint, program = config.checkpoint, _program(config, engine)
    if program.module == RUNTIME:
        return []
    own, least = "set it in the program's own arguments", config.watchdog.min_speed
    workers = config.data.workers
    asked = [
        (workers, f"data.workers={workers}", own),
        (checkpoint.in_background, "checkpoint.async=true", own),
        (checkpoint.keep, f"checkpoint.keep={checkpoint.keep}", own),
        (least, f"watchdog.min_speed={least}", "end slow runs by notify.breach.step_time=stop"),
    ]
    if not program.script and not program.module:  # a program of the user's may ask dslaunch.progress
        saving = _breaches(config, "checkpoint")
        asked += [(True, f"notify.breach.{name}=checkpoint", "save often") for name in saving]
    runs = program.script or program.module or f"the program of {engine.name}"
    return [
        f"{word} is for dslaunch.runtime, and this plan runs {runs}; leave it out, and {instead}"
        for wanted, word, instead in asked
        if wanted
    ]


def _program(config: RunConfig, engine: Engine) -> ProgramPlan:
    """The user's script or module; dslaunch.runtime where the engine is ours and nothing else is asked for."""
    if config.script:
        return ProgramPlan(script=config.script, args=config.script_args)
    module = config.module or (RUNTIME if engine.name == "native" else "")
    if module == RUNTIME:
        return ProgramPlan(module=module, args=("--plan", "{plan}", *config.script_args))
    return ProgramPlan(module=module, args=config.script_args)
