"""Why an attempt ended, told from what it left; and what the policy makes of it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from dslaunch.planfile import SupervisionPlan
from dslaunch.run.causes import Ending, Evidence, Facts, judge
from dslaunch.run.disk import RESERVE, full_disks, give_back, reserve
from dslaunch.run.policy import Past, decide, policies
from dslaunch.run.records import furthest, read_ranks
from dslaunch.schema.supervision import Action, Cause
from tests.command import CommandLine

Statuses = dict[int, str]


def _judge(
    folder: Path, statuses: Statuses, launcher: int = 1, stopped_by: str = "", kernel: tuple[Evidence, ...] = (),
    **logs: str,
) -> Ending:  # fmt: skip
    """The cause of an attempt whose ranks ended in this order; `rank_0` and `launcher_0` are logs."""
    ranks = folder / "ranks"
    ranks.mkdir()
    for order, (rank, status) in enumerate(statuses.items()):
        path = ranks / f"{rank}.exit"
        path.write_text(f"{status}\n")
        os.utime(path, (1000 + order, 1000 + order))
        (ranks / f"{rank}.pid").write_text(
            json.dumps({"host": f"n{rank + 1}", "pid": 100 + rank, "pgid": 1, "start_time": 1})
        )
    (folder / "logs").mkdir()
    for name, text in logs.items():
        (folder / "logs" / f"{name.replace('_', '-')}.log").write_text(text)
    return judge(Facts(launcher, stopped_by, kernel, read_ranks(ranks), folder / "logs"))


PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3333"
TEXTS = [
    ("OSError: [Errno 28] No space left on device", "disk_full"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", "gpu_memory"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "host_memory"),
    ("MemoryError", "host_memory"),
    ("DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
     "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "port_taken"),
    ("ModuleNotFoundError: No module named 'deepspeed'", "wrong_program"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'", "configuration"),
    ("deepspeed.runtime.config_utils.DeepSpeedConfigError: no", "configuration"),
    ("RuntimeError: PytorchStreamReader failed reading zip archive: invalid header", "checkpoint"),
    ("[E ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(", "communication"),
    (PEER_LOST, "communication"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_fault"),
    ("dslaunch.runtime: not as planned: steps 2 to 6 took 3 s each (median); the plan says 1 s: 33% of the "
     "planned speed; the bound is 39% (50% of the slow end of the plan's error band).", "not_as_planned"),
    ("ValueError: a batch that nobody expected", "program"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), TEXTS)
def test_a_ranks_last_words_tell_the_cause_and_are_quoted(text: str, cause: str, tmp_path: Path) -> None:
    ending = _judge(tmp_path, {0: "1"}, rank_0=f"step 1 loss 2\nTraceback (most recent call last):\n{text}\n")
    assert (ending.cause, ending.rank, ending.host) == (cause, 0, "n1")
    assert Evidence("rank-0.log:3", text) in ending.evidence
    assert text in ending.why


LOST = [
    "dslaunch: n2: lost: ssh exits 255: client_loop: send disconnect: Broken pipe",
    "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-29T21:00:00 DUE TO NODE FAILURE ***",
    "ssh: connect to host n2 port 22: No route to host",
]  # fmt: skip


@pytest.mark.parametrize("text", LOST)
def test_a_lost_host_is_told_by_the_launcher_and_not_by_the_ranks_that_lost_it(text: str, tmp_path: Path) -> None:
    ending = _judge(tmp_path, {0: "143"}, launcher=1, launcher_0=f"{text}\n", rank_0="step 7\n")
    assert (ending.cause, ending.rank, ending.evidence[0].line) == ("host_lost", None, text)


EXITS = [
    ("137", "killed"), ("139", "crashed"), ("134", "crashed"), ("2", "configuration"), ("127", "wrong_program"),
    ("143", "preempted"), ("running", "killed"), ("255", "program"), ("1", "program"),
]  # fmt: skip


def test_every_cause_has_a_case() -> None:
    here = {cause for _, cause in (*TEXTS, *EXITS)} | {"user", "host_lost"}
    elsewhere = {"hang", "breach"}  # the watchdog's chaos, and notify.breach (test_run_notify.py)
    assert here | elsewhere == set(policies())


@pytest.mark.parametrize(("status", "cause"), EXITS)
def test_without_a_text_the_exit_status_tells(status: str, cause: str, tmp_path: Path) -> None:
    assert _judge(tmp_path, {0: status}, launcher=1).cause == cause


@pytest.mark.parametrize("status", ["2", "126", "9"])
def test_what_the_rank_said_last_is_quoted(status: str, tmp_path: Path) -> None:
    said = "dslaunch.runtime: model.components.llm.hidden: found 32. Make them agree."
    assert said in _judge(tmp_path, {0: status}, rank_0=f"step 1\n{said}\n").why


def test_a_host_without_the_interpreter_is_not_lost(tmp_path: Path) -> None:
    said = (
        "dslaunch: n4: ssh exits 2: launcher.python: /no/python is not found on n4. Give the interpreter of the "
        "training environment there"
    )
    ending = _judge(tmp_path, {}, launcher=255, launcher_0=said)
    assert (ending.cause, ending.evidence[0].line) == ("wrong_program", said)
    (tmp_path / "lost").mkdir()
    lost = _judge(tmp_path / "lost", {}, launcher=255, launcher_0="dslaunch: n4: lost: no sign of life")
    assert lost.cause == "host_lost"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_lost_its_peers_is_not_where_it_began(order: tuple[int, ...], tmp_path: Path) -> None:
    """Whichever of the two records its end first."""
    statuses = dict.fromkeys(order, "1")
    ending = _judge(tmp_path, statuses, rank_0=PEER_LOST, rank_1="ValueError: no\n", launcher_0=PEER_LOST)
    assert (ending.cause, ending.rank, ending.host) == ("program", 1, "n2")


def test_what_others_print_of_a_killed_rank_is_no_cause(tmp_path: Path) -> None:
    ending = _judge(tmp_path, {1: "137", 0: "1"}, rank_0=PEER_LOST, rank_1="step 5\n")
    assert (ending.cause, ending.rank) == ("killed", 1)
    assert ending.evidence == (Evidence("n2", "rank 1 exits 137 (SIGKILL)"),)


def test_the_scheduler_says_who_killed_a_rank(tmp_path: Path) -> None:
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0."
    assert _judge(tmp_path, {1: "137"}, launcher_0=said).cause == "host_memory"


def test_preemption_is_told_by_slurm(tmp_path: Path) -> None:
    said = "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-29T21:00:00 DUE TO PREEMPTION ***"
    ending = _judge(tmp_path, {0: "143", 1: "143"}, slurm_12=said)
    assert (ending.cause, ending.evidence[0].line) == ("preempted", said)


def test_the_kernel_comes_before_the_logs(tmp_path: Path) -> None:
    said = Evidence("this host's kernel log", "Memory cgroup out of memory: Killed process 101 (python)")
    ending = _judge(tmp_path, {1: "137", 0: "1"}, kernel=(said,), rank_0=PEER_LOST)
    assert (ending.cause, ending.evidence[0], ending.rank) == ("host_memory", said, 1)
    xid = Evidence("this host's kernel log", "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.")
    (tmp_path / "x").mkdir()
    assert _judge(tmp_path / "x", {0: "1"}, kernel=(xid,), rank_0="RuntimeError: no\n").cause == "gpu_fault"


def test_a_killed_launcher_is_told_from_its_ranks_which_were_ended_with_it(tmp_path: Path) -> None:
    ending = _judge(tmp_path, {0: "143", 1: "143"}, launcher=137)
    assert (ending.cause, ending.evidence) == ("killed", (Evidence("the launcher", "exits 137 (SIGKILL)"),))


def test_a_full_disk_is_the_cause_though_no_rank_could_write_so(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.exit").write_text("1\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").touch()
    disk = Evidence("this host", "runs/a-1: No space left on device")
    facts = Facts(1, "", (), read_ranks(tmp_path / "ranks"), tmp_path / "logs", disks=(disk,))
    assert (judge(facts).cause, judge(facts).evidence[0]) == ("disk_full", disk)
    assert judge(replace(facts, stopped_by="SIGINT")).cause == "user"
    before = sorted(tmp_path.iterdir())
    assert full_disks([tmp_path, tmp_path / "nowhere"]) == ()
    assert sorted(tmp_path.iterdir()) == before


def test_the_room_that_is_held_for_the_last_records_is_given_back(tmp_path: Path) -> None:
    reserve(tmp_path)
    assert (tmp_path / RESERVE).stat().st_blocks * 512 >= 1 << 18
    give_back(tmp_path)
    give_back(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_users_signal_comes_before_everything(tmp_path: Path) -> None:
    ending = _judge(tmp_path, {0: "1"}, stopped_by="SIGINT", rank_0="No space left on device")
    assert ending.cause == "user"


def test_a_launcher_that_started_no_rank_is_judged_by_its_own_log(tmp_path: Path) -> None:
    said = "launch.sh: launcher.python: 'x' is not found. Set launcher.python to"
    ending = _judge(tmp_path, {}, launcher_0=said)
    assert ending.cause == "wrong_program"


def test_ranks_that_were_never_started_are_a_failure_though_the_launcher_has_none(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    facts = Facts(0, "", (), read_ranks(tmp_path / "ranks"), tmp_path / "logs", "only 0 of 2 ranks were started")
    assert "only 0 of 2 ranks were started" in judge(facts).why


def test_the_causes_of_the_file_are_those_of_the_schema() -> None:
    assert set(policies()) == set(get_args(Cause))
    for policy in policies().values():
        assert policy.action in get_args(Action)
        assert policy.next
        assert bool(policy.text) <= bool(policy.source), policy.cause
        for text in policy.text:
            re.compile(text)


@pytest.mark.parametrize("cause", ["configuration", "wrong_program", "user", "disk_full", "checkpoint"])
def test_what_a_person_must_change_is_never_retried(cause: str) -> None:
    assert decide(SupervisionPlan(restart_max=100), [Past(cause, 5)]).action == "stop"


@pytest.mark.parametrize("cause", ["configuration", "user"])
def test_nobody_can_ask_for_its_retry(cause: str, dslaunch: CommandLine) -> None:
    done = dslaunch("plan", "recipe=vla_tiny", f"restart.actions.{cause}=retry")
    assert done.status == 2
    assert f"restart: actions.{cause} is retry, and only stop is allowed" in done.err


def test_a_restart_counts_only_where_it_brought_no_new_step() -> None:
    plan = SupervisionPlan(restart_max=1, restart_wait_s=5.0)
    moving = [Past("killed", step) for step in (0, 3, 4, 9)]
    assert decide(plan, moving).action == "retry"
    stuck = [*moving, Past("killed", 9)]
    assert decide(plan, stuck).action == "stop"
    assert "1 restarts brought no new step, and restart.max is 1" in decide(plan, stuck).why
    behind = [*moving, Past("killed", 7)]
    assert decide(plan, behind).action == "stop", "steps that were done before are not new"


def test_without_restarts_the_first_failure_is_the_last() -> None:
    decision = decide(SupervisionPlan(restart_max=0), [Past("killed", 5)])
    assert decision.action == "stop"
    assert decision.why == "restart.max is 0 (the default without checkpoint.every)", "true with it as well"


def test_a_cause_has_a_limit_of_its_own() -> None:
    plan = SupervisionPlan(restart_max=100)
    assert decide(plan, [Past("program", 5)]).action == "retry"
    assert decide(plan, [Past("program", 5), Past("program", 5)]).action == "stop"
    assert decide(plan, [Past("program", 5), Past("killed", 5), Past("program", 5)]).action == "retry"
    assert decide(plan, [Past("program", 5), Past("program", 6)]).action == "retry"


def test_the_wait_doubles_with_each_restart_that_brought_nothing() -> None:
    plan = SupervisionPlan(restart_max=9, restart_wait_s=5.0)
    waits = [decide(plan, [Past("killed", 0)] * count).wait_s for count in (1, 2, 3)]
    assert waits == [5.0, 10.0, 20.0]


def test_the_user_decides_for_a_cause() -> None:
    plan = SupervisionPlan(restart_max=3, restart_actions={"killed": "stop", "disk_full": "retry"})
    assert decide(plan, [Past("killed", 5)]).action == "stop"
    assert decide(plan, [Past("disk_full", 5)]).action == "retry"


def test_a_step_is_done_when_every_rank_has_done_it(tmp_path: Path) -> None:
    for rank, step in ((0, "7 1 1000.0"), (1, "6"), (2, "")):
        (tmp_path / f"{rank}.exit").write_text("running")
        (tmp_path / f"{rank}.step").write_text(step)
    assert furthest(read_ranks(tmp_path)) == 6
    assert furthest([]) == 0
