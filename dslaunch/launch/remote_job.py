"""What a launch over ssh starts where."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslaunch.planfile import LauncherPlan, Plan, plan_from_json
from dslaunch.run.folder import verify

_PASSED = (
    "DSLAUNCH_RUN_DIR", "DSLAUNCH_WORK_DIR", "DSLAUNCH_PYTHON", "DSLAUNCH_MEGATRON_PATH", "DSLAUNCH_ATTEMPT",
    "DSLAUNCH_RESUME",
)  # fmt: skip
HOSTS = "hosts"
"""The hosts of this launch as a hostfile, in the run folder."""
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


@dataclass(frozen=True)
class RemoteJob:
    """A run folder, its hosts, and who starts the ranks on each."""

    plan: Plan
    files: Mapping[str, str]
    """The rendered files and `hosts`, name: text."""
    run_dir: Path
    hosts: Mapping[str, str]
    """Numbers of the devices to use by host, in rank order; an empty text is any."""
    runner: str
    """direct (the agent starts each rank) | deepspeed | torchrun"""
    variables: Mapping[str, str]
    """What the environment of every host gets."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RemoteJob:
        """The job of DSLAUNCH_RUN_DIR, DSLAUNCH_HOSTS (words `HOST=DEVICES`) and DSLAUNCH_RUNNER."""
        run_dir = Path(environ["DSLAUNCH_RUN_DIR"])
        files = verify(run_dir)
        plan = plan_from_json(files["plan.json"])
        names = [*(name for name in _PASSED if name in environ), *plan.launcher.pass_env]
        hosts = {
            host: devices for word in environ["DSLAUNCH_HOSTS"].split() for host, devices in [word.split("=")]
        }
        slots = plan.cluster.slots or (plan.cluster.gpus_per_node,) * len(hosts)
        lines = "".join(f"{host} slots={count}\n" for host, count in zip(hosts, slots, strict=True))
        runner, variables = environ["DSLAUNCH_RUNNER"], {name: environ[name] for name in names}
        return cls(plan, {**files, HOSTS: lines}, run_dir, hosts, runner, variables)

    @property
    def launcher(self) -> LauncherPlan:
        """The launcher's settings."""
        return self.plan.launcher

    @property
    def logs(self) -> Path:
        """Where the ranks of this attempt log to: rank.sh says the same."""
        attempt = int(self.variables.get("DSLAUNCH_ATTEMPT", "1"))
        return self.run_dir / "logs" / (f"attempt-{attempt}" if attempt > 1 else "")

    def rendezvous(self, first: Mapping[str, Any]) -> tuple[str, str]:
        """Address and port at which the ranks meet, on the first host.

        Args:
            first: the hello of the first host's agent: its addresses, the one that ssh reached it at, and a port
                that is free there.
        """
        port = str(self.launcher.master_port or first["port"])
        network = ipaddress.IPv4Network(self.launcher.subnet or "0.0.0.0/32")
        inside = [each for each in first["addresses"] if ipaddress.IPv4Address(each) in network]
        if inside:
            return inside[0], port
        name = next(iter(self.hosts)).split("@")[-1]
        address = first["address"] if self._serves_all(first["address"]) else name
        return address, port

    def _serves_all(self, address: str) -> bool:
        """Whether the other hosts can use this address: loopback and link-local ones mean something else there."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return len(self.hosts) == 1 or not (found.is_loopback or found.is_link_local)

    def commands(self, node: int, address: str, port: str) -> list[dict[str, Any]]:
        """What a host's agent starts; `tag` is the rank or, under a runner, the host."""
        host, devices = list(self.hosts.items())[node]
        shared = {"MASTER_ADDR": address, "MASTER_PORT": port}
        if devices and self.plan.cluster.accelerator in _VISIBLE:
            shared[_VISIBLE[self.plan.cluster.accelerator]] = devices
        if self.runner != "direct":
            own = {"RUNNER": self.runner, "NODE_RANK": str(node), "MASTER_ADDR": address, "MASTER_PORT": port}
            own["HOSTFILE"] = str(self.run_dir / HOSTS)
            own |= {"SLOTS": str(self.plan.cluster.slots[node])} if self.plan.cluster.slots else {}
            env = {**shared, **{f"DSLAUNCH_{name}": value for name, value in own.items()}}
            return [{"tag": host, "argv": ["bash", "launch.sh"], "env": env}]
        slots = self.plan.cluster.slots or (self.plan.cluster.gpus_per_node,) * len(self.hosts)
        first = sum(slots[:node])
        places = [self._place(first + local, local, node, slots[node]) for local in range(slots[node])]
        return [
            {"tag": place["RANK"], "argv": ["bash", "rank.sh"], "env": {**shared, **place}} for place in places
        ]

    def _place(self, rank: int, local: int, node: int, on_node: int) -> dict[str, str]:
        numbers = {
            "RANK": rank, "LOCAL_RANK": local, "NODE_RANK": node, "GROUP_RANK": node,
            "WORLD_SIZE": self.plan.world_size, "LOCAL_WORLD_SIZE": on_node, "LOCAL_SIZE": on_node,
        }  # fmt: skip
        return {name: str(number) for name, number in numbers.items()}
