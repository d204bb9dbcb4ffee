"""What happens when a run fails or stands still: restarts, and the watchdog."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dslaunch.schema.base import NonNegative, NonNegativeFloat, Part, Positive, Texts, VariableNameOrNone

Cause = Literal[
    "user", "hang", "host_memory", "gpu_fault", "disk_full", "gpu_memory", "port_taken", "preempted",
    "wrong_program", "configuration", "checkpoint", "communication", "host_lost", "killed", "crashed", "program",
    "breach", "not_as_planned",
]  # fmt: skip
"""Why an attempt ended; dslaunch/run/causes.yaml says by what each is known, and what is done by default."""
Action = Literal["stop", "retry", "retry_elsewhere", "requeue"]
Watched = Literal[
    "gradient_norm", "loss_jump", "step_time", "scaling_efficiency", "checkpoint_time", "gpu_activity",
    "gpu_utilization", "gpu_steadiness", "gpu_slowed", "nvlink_load", "communication_share",
    "straggler",
]  # fmt: skip
"""What is watched while a run trains; dslaunch/run/thresholds.yaml says where each is worth a look."""


class Restart(Part):
    """What follows when an attempt fails."""

    max: NonNegative | None = None
    """Restarts that may bring no new step; one after which the run got further than ever before is not counted.
    Not given: 3 where checkpoints are written during the run (checkpoint.every), 0 where they are not."""
    wait_s: NonNegativeFloat = 5.0
    """Seconds before a restart; they double with each restart that brings no new step."""
    actions: dict[Cause, Action] = {}
    """By cause, what is done in place of the default: stop, retry, retry_elsewhere (without the host where it
    began, where a spare one waits), requeue (by SLURM; elsewhere as retry)."""
    spares: Texts = ()
    """Hosts of the same kind that wait to take the place, and the ranks, of one that fails (launcher ssh)."""
    elastic: bool = False
    """Plan anew for the hosts that are left where one is lost and no spare one waits, and for all of them once it
    answers again: same recipe, global batch, learning rate, from the newest checkpoint (launchers ssh, slurm)."""
    min_nodes: Positive = 1
    """Fewest nodes that an elastic run goes on with; with fewer it stops."""

    @model_validator(mode="after")
    def _read_somewhere(self) -> Restart:
        for cause, action in self.actions.items():
            if cause in ("user", "configuration") and action != "stop":
                raise ValueError(f"actions.{cause} is {action}, and only stop is allowed: it would end alike")
        if not self.elastic and "min_nodes" in self.model_fields_set:
            raise ValueError("min_nodes is set, but elastic is false, so nothing reads it; set elastic to true")
        return self


class Watchdog(Part):
    """When a run counts as hanging, or as too slow. Steps count, not log lines: see dslaunch.progress."""

    minutes: NonNegativeFloat = 20.0
    """Minutes in which no rank completes a step, after the first one; longer than the longest checkpoint or
    evaluation. 0 turns it off."""
    start_minutes: NonNegativeFloat | None = None
    """Minutes until the first step; 0: no limit. Not given: 60 for dslaunch.runtime, no limit for programs of
    yours, which need not report steps."""
    min_speed: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Least share of the planned speed at which dslaunch.runtime goes on behind its first six steps; else it ends
    with an error. 0: no bound. Not given: half of what the error band of the plan's time leaves; none on CPUs."""


class Notify(Part):
    """What the supervisor tells outside of the run folder."""

    webhook: VariableNameOrNone = ""
    """Name of the environment variable that holds an address, such as a chat service's; it gets a POST with JSON
    where an attempt ends, the run hangs, a threshold is breached, and the run ends. The address stands nowhere."""
    breach: dict[Watched, Literal["tell", "checkpoint", "stop"]] = {}
    """By threshold, what its breach does beside being told: checkpoint asks the program to save after its step
    (dslaunch.runtime does; a script asks dslaunch.progress.save_asked); stop ends the run, whose ranks get SIGTERM
    first, at which dslaunch.runtime saves; tell, the default, leaves it alone."""
    wandb: str = ""
    """Project of Weights & Biases that the supervisor logs the run's figures to; empty: none. Its Python needs the
    package wandb; with wandb_mode=online the key is taken from WANDB_API_KEY, which launcher.pass_env hands on."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: into the run folder alone, for `wandb sync`; online: sent as it comes."""
    prometheus_dir: str = ""
    """Folder for a text file with step, ranks and training figures, such as that of node_exporter's textfile
    collector; absolute, or from where the run was launched."""

    @model_validator(mode="after")
    def _read_somewhere(self) -> Notify:
        if not self.wandb and "wandb_mode" in self.model_fields_set:
            raise ValueError("wandb_mode is set, but wandb is empty, so nothing reads it; set wandb to a project")
        return self
