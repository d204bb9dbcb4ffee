"""The fan-out: many commands at once, each with its own limit, and nothing left of any."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from dslaunch.remote import on_all, over_ssh


def _sh(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


def test_answers_come_in_the_order_of_the_hosts_with_what_each_said() -> None:
    commands = {
        "slow": _sh("sleep 0.3; cat"),
        "fails": _sh("echo no >&2; echo why >&2; exit 7"),
        "killed": _sh("kill -9 $$"),
    }
    before = time.time()
    answers = on_all(commands, "a question", 20.0)
    assert list(answers) == ["slow", "fails", "killed"]
    assert (answers["slow"].status, answers["slow"].out) == (0, "a question")
    assert before < answers["slow"].heard < time.time()
    assert (answers["fails"].status, answers["fails"].why) == (7, "why")
    assert answers["killed"].status == -9
    assert answers["killed"].heard == 0.0


def test_a_host_that_does_not_answer_costs_its_own_limit_only(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = _sh(f"echo begun; sleep 100 & echo $! >'{pid}'; wait")
    start = time.monotonic()
    answers = on_all({"hangs": hangs, **{f"h{n}": _sh("echo 1") for n in range(20)}}, "", 3.0)
    assert time.monotonic() - start < 60
    assert answers["hangs"].status is None
    assert answers["hangs"].out == "begun\n"
    assert answers["hangs"].why == "no answer within 3 s"
    assert {answer.out for host, answer in answers.items() if host != "hangs"} == {"1\n"}
    deadline = time.monotonic() + 30
    while _runs(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(pid.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_stays_in_the_background_with_the_pipes_is_not_waited_for() -> None:
    start = time.monotonic()
    answer = on_all({"h": _sh("sleep 60 & echo $!")}, "", 100.0)["h"]
    assert time.monotonic() - start < 30
    assert answer.status == 0
    os.kill(int(answer.out), signal.SIGKILL)


def test_more_hosts_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, each as large as the hard limit allows."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: None)
    answers = on_all({f"h{n}": ("echo", str(n)) for n in range(60)}, "", 20.0)
    assert [answer.out for answer in answers.values()] == [f"{n}\n" for n in range(60)]


def test_large_output_is_read_to_its_end_and_cut() -> None:
    answer = on_all({"h": _sh("head -c 9000000 /dev/zero | tr '\\0' x")}, "", 20.0)["h"]
    assert (answer.status, len(answer.out)) == (0, 4 * 2**20)


def test_the_ssh_command_asks_for_nothing_and_takes_no_option_for_a_host() -> None:
    words = over_ssh("root@n1", ["/a b/python", "-", "n1"], 11.6)
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert "ConnectTimeout=12" in words
    assert words[-3:] == ("--", "root@n1", "exec '/a b/python' - n1")
