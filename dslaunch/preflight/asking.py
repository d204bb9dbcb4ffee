"""Asking the hosts: a Python file goes to each, over standard input, and one line of JSON comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dslaunch.preflight import allocation
from dslaunch.preflight.facts import Host, host_from
from dslaunch.preflight.target import Target
from dslaunch.remote import Answer, on_all, over_ssh

_CONNECT_SHARE, _ANSWER_SHARE = 0.4, 0.5
"""Of a host's time, what the connection and the answers may take; the rest is for starting the interpreter."""


def ask(target: Target, limit_s: float) -> tuple[Host, ...]:
    """Every host's facts, in the order of the hosts; each host has `limit_s` seconds."""
    request = {
        "deadline_s": limit_s * _ANSWER_SHARE,
        "dcgm": target.preflight.dcgm and target.gpus,
        "folders": {"checkpoints": target.checkpoint_dir},
        "script": "" if target.container else target.script,
        "names": target.names if target.several else (),
        "master": target.hosts[0],
        "port": target.port,
        "env": target.preflight.env,
        "programs": target.programs,
    }
    answers = run_python(target, program("probe.py", request), limit_s)
    return tuple(host_from(answers[name]) for name in target.hosts)


def program(name: str, request: Mapping[str, Any]) -> str:
    """The text of one of the programs that are sent, with its request."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return f"{text}\nmain(json.loads({json.dumps(request)!r}), sys.argv[1])\n"


def run_python(target: Target, text: str, limit_s: float) -> dict[str, Answer]:
    """Run a program with the training's Python on every host, which is told its own name."""
    if target.way == "srun":
        return allocation.run_python(target, text, limit_s)
    commands: dict[str, tuple[str, ...]] = {host: (target.python, "-", host) for host in target.hosts}
    if target.way == "ssh":
        commands = {host: over_ssh(host, words, limit_s * _CONNECT_SHARE) for host, words in commands.items()}
    return on_all(commands, text, limit_s)
