"""What our rules say of the deepspeed launcher's and torchrun's lines, against both up to their first process."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.real.parts import need

need("torch", "deepspeed")

from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules.checking import hits  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.real.agreeing import Judged, agree  # noqa: E402

Launched = Callable[[Sequence[str], str], str | None]
_HOSTS = st.sampled_from(["n1", "n2", "n3", "10.0.0.4"])
_LINES = st.one_of(
    st.builds("{} slots={}".format, _HOSTS, st.sampled_from([1, 2, 4, 8])),
    st.builds("{} slots={}".format, _HOSTS, st.sampled_from([4, 8])),
    st.sampled_from([
        "n1", "n4  slots=8 # big", "# n5 slots=8", "", "n4:8", "n4 slot=8", "  n4 slots=8",
        "n4 slots = 8",
        "n4\tslots=8", "n4 slots=8 max_slots=8",
    ]),
)  # fmt: skip
_HOSTFILES = st.one_of(
    st.just("n1 slots=8\nn2 slots=8\n"), st.just("n1 slots=4\nn2 slots=8\nn3 slots=8\n"),
    st.lists(_LINES, max_size=4).map("\n".join),
)  # fmt: skip
_FILTERS = st.sampled_from([
    "n1", "n1@n2", "n2:0,1", "n1:0,1@n2:2", "n9", "n1:0-3", "n1,n2", "n1:8", "n1:7,7", "n1@n1:1", "n2:", ":0",
    "n1:a", "n1:0,1,2,3,4,5,6,7@n2", "n1 @n2", "n2:0, 1", "n1:-1", "n1:0:1",
])  # fmt: skip
_COUNTS = st.sampled_from(["1", "2", "3", "0", "-1", "two", "2.0"])
_OPTIONS = st.one_of(
    *(
        st.builds(lambda name, value: [name, value], st.sampled_from(names), values)
        for names, values in (
            (["--include", "-i"], _FILTERS), (["--exclude", "-e"], _FILTERS),
            (["--num_nodes"], _COUNTS), (["--num_gpus", "--num_accelerators"], _COUNTS),
            (["--launcher"], st.sampled_from(["pdsh", "PDSH", "openmpi", "mpich", "slurm", "impi", "mpirun"])),
            (["--master_port"], st.sampled_from(["29500", "x", "29500.5"])),
            (["--node_rank"], st.sampled_from(["0", "1", "5", "-1"])),
            (["--ssh_port"], st.sampled_from(["22", "ssh"])),
            (["--log_level"], st.sampled_from(["info", "warning", "loud", "INFO"])),
        )
    ),
    st.sampled_from([
        ["--no_ssh"], ["--force_multi"], ["--module"], ["--no_python"], ["--no_local_rank"], ["--save_pid"],
        ["--quiet"], ["--bind_cores_to_rank"], ["--nproc_per_node", "8"], ["--num-gpus", "8"], ["--num_node", "1"],
        ["--elastic_training"], ["--nnodes=2"], ["--no_ssh_checks"],
    ]),
)  # fmt: skip


def _word(name: str, value: str, together: bool) -> list[str]:
    return [f"{name}={value}"] if together and name.startswith("--") else [name, value]


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[str], str]:
    """The words of a command, and the hostfile that it names."""
    drawn = draw(st.lists(_OPTIONS, max_size=3, unique_by=lambda each: each[0]))
    given = [word for words in drawn for word in words]
    script = draw(st.sampled_from([["train.py"], ["train.py", "--num_gpus", "x"], ["train.py", "--lr", "1e-4"]]))
    common = ["--hostfile", "hosts", "--master_addr", "10.0.0.1", "--no_ssh_check"]
    return [*common, *given, *script], draw(_HOSTFILES)


class StartedError(Exception):
    """The launcher would begin its processes."""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """DeepSpeed's launcher on a command: what it raises before it starts a process, or None."""
    from deepspeed.launcher import launch, multinode_runner, runner
    from deepspeed.utils import logger

    def begin(words: Sequence[str], **_: Any) -> Any:
        """What the launcher starts on this host is its other half, which begins with the ranks it has here."""
        if "deepspeed.launcher.launch" not in words or json.loads(_world(words)):
            raise StartedError
        monkeypatch.setattr("sys.argv", list(words[3:]))
        launch.main()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner.subprocess, "Popen", begin)
    monkeypatch.setattr(logger, "disabled", True)
    for name in ("PDSH", "OpenMPI", "MPICH", "IMPI", "MVAPICH", "Slurm"):  # which need not be installed here
        monkeypatch.setattr(getattr(multinode_runner, f"{name}Runner"), "backend_exists", lambda _: True)

    def judge(words: Sequence[str], hostfile: str) -> str | None:
        Path("hosts").write_text(hostfile, encoding="utf-8")
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                runner.main(list(words))
            except StartedError:
                return None
            except SystemExit:
                return said.getvalue()[-300:]
            except Exception as error:
                return repr(error)
        return None

    before = dict(os.environ)
    yield judge
    os.environ.clear()
    os.environ.update(before)


def _world(words: Sequence[str]) -> bytes:
    (given,) = (word.partition("=")[2] for word in words if word.startswith("--world_info="))
    return base64.urlsafe_b64decode(given)


def refused(words: Sequence[str], hostfile: str) -> list[str]:
    """Our errors that the launcher itself raises."""
    files = read_fileset({"run.sh": f"#!/bin/bash\ndeepspeed {shlex.join(words)}\n", "hosts": hostfile})
    return [
        rule.id for rule, hit in hits(None, files, Settings())
        if (hit.severity or rule.severity) == "error"
        and (hit.raised_by or rule.raised_by) == "deepspeed launcher"
    ]  # fmt: skip


def test_lines_are_judged_as_the_launcher_judges_them(launched: Launched) -> None:
    def judged(drawn: tuple[list[str], str]) -> Judged:
        return launched(*drawn), refused(*drawn)

    agree(lines(), judged, examples=300, first_seed=17, share=8)


_RUN = st.one_of(
    *(
        st.builds(_word, st.sampled_from(names), st.sampled_from(values), st.booleans())
        for names, values in (
            (["--nnodes"], ["1", "2", "1:4", "4:1", "two", "0", "1:", "2:2:2", "1.0"]),
            (["--nproc-per-node", "--nproc_per_node"], ["1", "8", "auto", "cpu", "all", "8.0", "-1", "0", "CPU"]),
            (["--node-rank", "--node_rank"], ["0", "1", "x", "-1"]),
            (["--master-port", "--master_port"], ["29500", "x", "1.5"]),
            (["--master-addr", "--master_addr"], ["127.0.0.1", "n1"]),
            (["--rdzv-backend", "--rdzv_backend"], ["c10d", "static", "etcd3", "c10", "C10D"]),
            (["--rdzv-endpoint", "--rdzv_endpoint"], ["n1:29500", "n1", "localhost:0"]),
            (["--rdzv-id", "--rdzv_id"], ["7", "job"]),
            (["--rdzv-conf", "--rdzv_conf"], ["timeout=900", "timeout", "a=1,b=2", "join_timeout=60,is_host=0"]),
            (["--max-restarts", "--max_restarts"], ["0", "3", "x", "-1"]),
            (["--monitor-interval", "--monitor_interval"], ["0.1", "5", "x"]),
            (["--start-method", "--start_method"], ["spawn", "fork", "thread"]),
            (["--log-dir", "--log_dir"], ["logs"]),
            (["-r", "--redirects"], ["3", "0:1,1:2", "0:9", "x", "5"]), (["-t", "--tee"], ["3", "0:3", "a:3"]),
            (["--local-ranks-filter", "--local_ranks_filter"], ["0", "0,1", "a"]),
            (["--role"], ["trainer"]), (["--local-addr", "--local_addr"], ["10.0.0.1"]),
            (["--num_processes", "--nprocs", "--gpus", "--nproc", "--master", "--nproc-per"], ["1"]),
        )
    ),
    st.sampled_from([
        ["--standalone"], ["-m"], ["--module"], ["--no-python"], ["--no_python"], ["--run-path"], ["--std=1"],
    ]),
)  # fmt: skip


@st.composite
def torchruns(draw: st.DrawFn) -> list[str]:
    """The words behind torchrun."""
    drawn = draw(st.lists(_RUN, max_size=4, unique_by=lambda each: each[0].partition("=")[0].replace("_", "-")))
    return [*(word for words in drawn for word in words), "train.py", *draw(st.sampled_from([[], ["--lr", "1"]]))]


def begun(words: Sequence[str]) -> str | None:
    """What torchrun raises before it meets other nodes, or None."""
    from torch.distributed import run
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import api, registry

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            config, entry, given = run.config_from_args(run.parse_args(list(words)))
            WorkerSpec(config.role, config.nproc_per_node, None, entrypoint=entry, args=tuple(given))
        except SystemExit:
            return said.getvalue()[-300:]
        except Exception as error:
            return repr(error)
    registry._register_default_handlers()
    backends = api.rendezvous_handler_registry._registry
    return None if config.rdzv_backend in backends else f"ValueError: no backend {config.rdzv_backend}"


def test_lines_are_judged_as_torchrun_judges_them() -> None:
    def judged(words: list[str]) -> Judged:
        files = read_fileset({"run.sh": f"#!/bin/bash\ntorchrun {shlex.join(words)}\n"})
        found = [
            rule.id for rule, hit in hits(None, files, Settings())
            if (hit.severity or rule.severity) == "error" and (hit.raised_by or rule.raised_by) == "torchrun"
        ]  # fmt: skip
        return begun(words), found

    agree(torchruns(), judged, examples=300, first_seed=18, share=8)
