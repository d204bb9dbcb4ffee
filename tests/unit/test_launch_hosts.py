"""Which hosts and GPUs a launch uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from dslaunch.launch.hosts import host_words, hosts_of
from dslaunch.launch.request import LaunchRequest
from tests.launching import make_files, make_plan

HOSTFILE = "a slots=4\nb slots=2 type=A100 # new\nc slots=4\n"


def _request(folder: Path, text: str = HOSTFILE, nodes: int = 2, **launcher: Any) -> LaunchRequest:
    (folder / "hosts").write_text(text)
    named = {} if "hosts_command" in launcher else {"hostfile": "hosts"}
    plan = make_plan(nodes=nodes, local=False, name="ssh", **named, **launcher)
    return LaunchRequest(
        plan, make_files(plan), folder / "run", folder, {"PATH": "/usr/bin:/bin", "N": "x"}, wait=False
    )


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ({"include": "c@a"}, "a= c="),
        ({"exclude": "b"}, "a= c="),
        ({"include": "a:1,3@b"}, "a=1,3 b="),
        ({"include": "a:1@b@a:3"}, "a=1,3 b="),
        ({"exclude": "c@a:0"}, "a=1,2 b="),
        ({"hosts_command": "printf '%s\\n' $N y"}, "x= y="),
        ({"hosts_command": "echo 'u@x slots=2'; echo; echo 'y slots=3'"}, "u@x= y="),
    ],
)
def test_hosts_are_chosen_in_the_hostfiles_order(
    launcher: dict[str, str], words: str, tmp_path: Path
) -> None:
    request = _request(tmp_path, **launcher)
    assert host_words(request) == words
    assert list(hosts_of(request)) == [word.split("=")[0] for word in words.split()]


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ({}, "hosts: names 3 hosts, but the plan has 2 nodes"),
        ({"include": "a"}, r"hosts with launcher\.include: names 1 hosts"),
        ({"include": "a@d"}, r"launcher\.include: 'd' is not among the hosts a, b, c"),
        ({"exclude": "a:4"}, r"launcher\.exclude: a has no GPU 4; it has 0, 1, 2, 3"),
        ({"include": "a:x@b"}, r"launcher\.include: 'a:x' names 'x' where a GPU's number belongs"),
        ({"include": "a:1@b"}, r"a has slots=1, but the plan uses 2"),
        ({"hosts_command": "echo no >&2; exit 3"}, r"launcher\.hosts_command: .* exits 3: no"),
        ({"hosts_command": "true"}, r"launcher\.hosts_command: names no host"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(launcher: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        host_words(_request(tmp_path, **launcher))


def test_another_type_of_gpu_is_refused(tmp_path: Path) -> None:
    text = "a slots=2 type=a100\nb slots=2 type=H100\n"
    with pytest.raises(ConfigError, match="hosts:2: b has type=H100, but the plan is for A100-SXM4-80GB"):
        host_words(_request(tmp_path, text))
    assert host_words(_request(tmp_path, text.replace("H100", "A100-SXM4"))) == "a= b="
