"""What the outside of a run is told: a webhook that answers, and the text file that node_exporter reads."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from dslaunch.launch.checks import check_machine
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute
from dslaunch.launch.supervised import run_attempts
from dslaunch.planfile import Plan, SupervisionPlan
from dslaunch.progress import save_asked
from dslaunch.run.state import State, read_events, read_state, write_state
from tests.command import CommandLine
from tests.launching import make_files, make_plan

WEBHOOK = "TEST_WEBHOOK_ADDRESS"
RANKS = """
mkdir -p ranks
echo '{"step": 7, "loss": 1.5, "grad_norm": 30.0, "note": "x"}' >>metrics.jsonl
echo '7 1 1700000000.0' >ranks/0.step
if [[ -d ranks.attempt-1 ]]; then echo 0 >ranks/0.exit; exit 0; fi
for _ in {1..300}; do grep -qs '"breach"' events.jsonl && break; sleep 0.1; done
echo 'ValueError: a batch' >>logs/rank-0.log
echo 1 >ranks/0.exit
exit 1
"""
"""The first start breaches a threshold and fails, the second succeeds."""


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's figures are looked at every 5 seconds: a test need not wait as long."""
    monkeypatch.setattr("dslaunch.run.thresholds._LOOK_EVERY_S", 0.3)


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a web server of this test, and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook/secret", posted
    server.shutdown()
    thread.join()
    server.server_close()


def run_in(folder: Path, **wanted: Any) -> tuple[int, list[str], Path]:
    """A run of RANKS in `folder`: its status, what it said, and its run folder."""
    run_dir = folder / "runs" / "tiny-1"
    (run_dir / "logs").mkdir(parents=True)
    write_state(run_dir, State(run_dir.name, "local", "prepared", work_dir=str(folder)))
    supervision = SupervisionPlan(restart_max=1, restart_wait_s=0.0, **wanted)
    plan = dataclasses.replace(make_plan(1, 1), supervision=supervision)
    step = Execute(("bash", "-c", RANKS), run_dir, {}, run_dir / "logs" / "launcher.log", ranks=1)
    said: list[str] = []
    return run_attempts(step, plan, run_dir, lambda: 1, said.append), said, run_dir


def test_a_webhook_hears_of_breaches_ends_and_restarts(
    inbox: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, posted = inbox
    monkeypatch.setenv(WEBHOOK, address)
    status, said, run_dir = run_in(tmp_path, webhook=WEBHOOK)
    assert status == 0
    assert [each["kind"] for each in posted] == ["breach", "attempt_ended", "finished"]
    assert {each["run"] for each in posted} == {"tiny-1"}
    breach, ended, _ = posted
    assert (breach["details"]["threshold"], breach["details"]["value"]) == ("gradient_norm", 30.0)
    assert [ended["details"][name] for name in ("cause", "action", "step")] == ["program", "retry", 7]
    assert "attempt 1 ended: the program failed; rank-0.log:1: ValueError: a batch" in ended["text"]
    written = [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    assert not any("secret" in text for text in [*written, *said])


def test_a_breach_that_is_to_stop_the_run_does_so_and_is_not_retried(tmp_path: Path) -> None:
    status, said, run_dir = run_in(tmp_path, stopping_breaches=("gradient_norm",))
    assert status == 1
    assert read_state(run_dir).status == "failed"
    (ended,) = [event["details"] for event in read_events(run_dir) if event["kind"] == "attempt_ended"]
    assert (ended["cause"], ended["action"]) == ("breach", "stop")
    assert "grad_norm 30 is above 10" in ended["evidence"][0]
    assert any("`dslaunch resume` goes on" in line for line in said)


def test_a_breach_may_ask_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, run_dir = run_in(tmp_path, saving_breaches=("gradient_norm",))
    assert status == 0
    (asked,) = [event["details"] for event in read_events(run_dir) if event["kind"] == "save_asked"]
    assert asked == {"attempt": 1, "threshold": "gradient_norm"}
    assert not save_asked()
    monkeypatch.setenv("DSLAUNCH_RUN_DIR", str(run_dir))
    assert [save_asked(), save_asked()] == [True, False]


def test_a_program_that_cannot_be_asked_for_a_checkpoint_is_refused(dslaunch: CommandLine) -> None:
    """Megatron's saves and ends at a signal, and does nothing else when it is asked."""
    words = ("recipe=llama3_70b", "cluster=64xH100", "engine=megatron", "strategy=auto")
    done = dslaunch("plan", *words, "notify.breach.step_time=checkpoint")
    assert done.status == 3
    assert "notify.breach.step_time=checkpoint is for dslaunch.runtime, and this plan runs the program" in done.err


@pytest.mark.parametrize(
    ("address", "why"),
    [("http://127.0.0.1:9/secret", "leads nowhere"), ("secret", "holds no address"), (None, "is not set")],
)
def test_a_webhook_that_fails_is_told_once_and_changes_nothing(
    address: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address:
        monkeypatch.setenv(WEBHOOK, address)
    status, said, _ = run_in(tmp_path, webhook=WEBHOOK)
    assert status == 0
    (told,) = (line for line in said if line.startswith("notify.webhook"))
    assert f"{WEBHOOK} {why}" in told
    assert "secret" not in told


def test_a_text_file_has_the_figures_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    status, _, _ = run_in(tmp_path, prometheus_dir="metrics")
    assert status == 0
    (file,) = (tmp_path / "metrics").iterdir()
    assert file.name == "dslaunch-tiny-1.prom"
    sample = re.compile(r'([a-z_]+)\{run="tiny-1"\} (\S+)')
    found = {
        match[1]: float(match[2])
        for line in file.read_text().splitlines()
        if not line.startswith("#") and (match := sample.fullmatch(line))
    }
    assert found == {
        "dslaunch_up": 0, "dslaunch_attempt": 2, "dslaunch_step": 7, "dslaunch_ranks_started": 1,
        "dslaunch_ranks_failed": 0, "dslaunch_train_step": 7, "dslaunch_train_loss": 1.5,
        "dslaunch_train_grad_norm": 30.0,
    }  # fmt: skip
    assert file.read_text().count("# TYPE ") == len(found)


def test_a_folder_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    status, said, _ = run_in(tmp_path, prometheus_dir="nowhere")
    assert status == 0
    assert len([line for line in said if line.startswith("notify.prometheus_dir")]) == 1


def test_a_launch_without_the_address_is_refused(tmp_path: Path) -> None:
    plan: Plan = dataclasses.replace(make_plan(), supervision=SupervisionPlan(webhook=WEBHOOK))
    (tmp_path / "train.py").touch()
    request = LaunchRequest(plan, make_files(plan), tmp_path / "run", tmp_path, {}, wait=False)
    with pytest.raises(ConfigError, match=f"notify.webhook: {WEBHOOK} is not set in this shell"):
        check_machine(request, "local")
