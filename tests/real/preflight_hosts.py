"""Hosts over ssh as preflight's tests need them: each with folders and a Python of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.real.hosts import Hosts

CLUSTER = """
gpu: {name: CPU, accelerator: cpu, memory_gib: 2.0, hbm_gb_per_s: 10, peak_tflops: {fp32: 0.1, bf16: 0.1},
      context_gib: 0.5, pcie_gb_per_s: 10, source: a test}
node: {gpus: 2, nvlink_domain: 1, cpu_cores: 2, host_memory_gib: 16.0, source: a test}
intra: {kind: memory, gb_per_s: 0.01, latency_us: 50, source: a test}
network: {kind: ethernet, gb_per_s: 0.005, latency_us: 50, source: a test}
"""
TORCH = "99.0.0"
"""A version of torch that only a folder on PYTHONPATH claims to be."""


@dataclass(frozen=True)
class Place:
    """Folders that each host has of its own, and the site's folder that names the hosts."""

    root: Path
    hosts: Hosts

    @property
    def python(self) -> Path:
        """On every host a script that starts the tests' Python."""
        return self.root / "env" / "python"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def words(self, *more: str) -> list[str]:
        names = ",".join(self.hosts.names)
        return [
            "recipe=vla_tiny", f"cluster={len(self.hosts.names)}x2xcpus", f"cluster.hosts=[{names}]",
            "launcher=ssh",
            "--config-dir", str(self.root / "site"), f"launcher.python={self.python}",
            f"checkpoint.dir={self.checkpoints}", f"script={self.root / 'code' / 'train.py'}", "module=",
            f"env.TORCH_EXTENSIONS_DIR={self.root / 'extensions'}", f"run.root={self.root / 'runs'}",
            "training.micro_batch=4", *more,
        ]  # fmt: skip

    def on(self, host: str, command: str) -> str:
        """What a shell command on a host prints."""
        done = subprocess.run(
            ["ssh", "-n", host, command], env=self.hosts.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def dslaunch(self, *words: str, limit_s: float = 300.0) -> tuple[int, str, str]:
        """Exit status, output and errors of a command line, typed beside the hosts."""
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", *words], env=self.hosts.environ, cwd=self.root,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def prepare(self) -> None:
        """Make all hosts alike, and in order."""
        conf = self.root / "site" / "conf" / "cluster"
        conf.mkdir(parents=True, exist_ok=True)
        (conf / "cpus.yaml").write_text(CLUSTER)
        (self.root / "code" / "train.py").write_text("print(1)\n")
        for host in self.hosts.names:
            self.put_python(host)
            self.on(host, f"echo 'print(1)' >{shlex.quote(str(self.root / 'code' / 'train.py'))}")

    def put_python(self, host: str, path: str = "") -> None:
        """Give a host its interpreter, with `path` as its PYTHONPATH."""
        script = f"#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {shlex.quote(sys.executable)} \"$@\"\n"
        self.on(host, f"printf %s {shlex.quote(script)} >{self.python} && chmod 755 {self.python}")


def private_folders(root: Path) -> tuple[Path, ...]:
    folders = tuple(root / name for name in ("env", "checkpoints", "code", "extensions"))
    for folder in folders:
        folder.mkdir()
    return folders
