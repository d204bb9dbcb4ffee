"""The whole configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dslaunch.schema.base import Name, Part, Positive, Texts
from dslaunch.schema.cluster import Cluster
from dslaunch.schema.fabric import Fabric
from dslaunch.schema.launch import Checkpoint, Data, Engine, Goal, Launcher, Run
from dslaunch.schema.model import Model
from dslaunch.schema.preflight import Preflight
from dslaunch.schema.profile import Profile
from dslaunch.schema.strategy import ComponentStrategy, Strategy
from dslaunch.schema.supervision import Notify, Restart, Watchdog
from dslaunch.schema.training import Training

Layout = dict[Name, ComponentStrategy]


class RunConfig(Part):
    """One recipe on one cluster, ready to plan."""

    name: Name
    """Name of the run."""
    recipe: str = ""
    """The recipe it came from."""
    about: str = ""
    """One line for the list of recipes."""
    model: Model
    cluster: Cluster
    fabrics: dict[Name, Fabric] = {}
    """What each fabric calls for; read from conf/fabric, the site's files first."""
    training: Training
    strategy: Strategy
    layouts: dict[Positive, Layout] = {}
    """The recipe's layouts by number of GPUs: what strategy=layouts takes."""
    goal: Goal = Goal()
    engine: Engine = Engine()
    launcher: Launcher = Launcher()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
    restart: Restart = Restart()
    watchdog: Watchdog = Watchdog()
    notify: Notify = Notify()
    preflight: Preflight = Preflight()
    profile: Profile = Profile()
    script: str = ""
    """The training script, run on every rank; what follows -- on the command line are its arguments."""
    module: str = ""
    """A Python module to run instead of a script."""
    script_args: Texts = ()
    """Arguments of the script or module. They may hold {plan}, {ds_config}, {run_dir}, {checkpoint_dir}, and what
    the plan decides: {micro_batch}, {num_microbatches}, {global_batch}, {seq_len}, {steps}, {seed}, {clip}, {lr},
    {weight_decay}, {warmup_steps}."""
    env: Annotated[dict[str, str], Field(default_factory=dict)]
    """Environment variables of every rank. Secrets do not belong here: name them in launcher.pass_env."""
