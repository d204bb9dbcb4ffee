"""`dslaunch check` on files that are hostile, broken or huge: an answer in bounded time and memory."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

SECONDS = 30
"""Of one processor; the start alone takes half of one."""
BYTES = 2 * 2**30
"""Of address space."""

FLAGS = " ".join(f"--no-such-flag-{number} 1" for number in range(20_000))
TEXTS: dict[str, tuple[str, str | bytes]] = {
    "10 MB of unknown keys": (
        "ds_config.json", "{" + ",".join(f'"k{number:07}":1' for number in range(750_000)) + "}",
    ),
    "10 MB of misspelt keys": (
        "ds_config.json",
        '{"zero_optimization":{' + ",".join(f'"overlap_com{number:06}":1' for number in range(400_000)) + "}}",
    ),
    "10 MB of one key": ("ds_config.json", "{" + ",".join(['"fp16":{}'] * 900_000) + "}"),
    "10 MB of auto": ("ds_config.json", '{"optimizer":{"params":{"betas":[' + '"auto",' * 1_200_000 + "1]}}}"),
    "10 MB of one value": ("ds_config.json", '{"train_batch_size": "' + "8" * 9_900_000 + '"}'),
    "10 MB cut off": ("ds_config.json", '{"a": [' + '{"b": 1}, ' * 900_000),
    "11 MB": ("ds_config.json", " " * 11_000_000),
    "nested 100,000 deep": ("ds_config.json", '{"a":' * 100_000),
    "YAML nested 100,000 deep": ("a.yaml", "a: " + "[" * 100_000),
    "Python nested 100,000 deep": ("train.py", "x = " + "[" * 100_000),
    "a shell script nested 100,000 deep": ("run.sh", "#!/bin/sh\n" + "$(" * 100_000),
    "half a character": ("ds_config.json", '{"a\\ud800": 1, "train_batch_size": 8}'),
    "a YAML bomb": (
        "accelerate.yaml",
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")),
    ),
    "100,000 hosts": ("hostfile", "".join(f"worker-{number} slots=8\n" for number in range(100_000))),
    "100,000 times one host": ("hostfile", "worker-1 slots=8\n" * 100_000),
    "100,000 lines that are no host": ("hostfile", "worker-1 slot=8\n" * 100_000),
    "20,000 variables": ("env.sh", "".join(f"export NCCL_X{number}=1\n" for number in range(20_000))),
    "90,000 bad lines of an environment": (".deepspeed_env", "# export A\n" * 90_000),
    "30,000 unknown options of sbatch": (
        "job.sbatch", "#!/bin/bash\n" + "".join(f"#SBATCH --unknown-{n}=1\n" for n in range(30_000)),
    ),
    "20,000 unknown flags": ("run.sh", f"#!/bin/bash\ntorchrun pretrain_gpt.py --num-layers 2 {FLAGS}\n"),
    "15,000 launches": ("run.sh", "#!/bin/bash\n" + "deepspeed --num_gpus 8 t.py --deepspeed c.json\n" * 15_000),
    "20,000 findings in Python": (
        "train.py", "import torch\nfor é in loader:\n" + "    print(loss.item(), 'é')\n" * 20_000,
    ),
    "a binary": ("ds_config.json", b'{"a": \0\1\2}'),
    "no UTF-8": ("ds_config.json", b'{"a": "\xe9"}'),
    "nothing": ("ds_config.json", ""),
    "nothing in YAML": ("a.yaml", ""),
    "nothing in Python": ("train.py", ""),
    "nothing in a script": ("run.sh", ""),
    "nothing in a hostfile": ("hostfile", ""),
    "a line without an end": ("run.sh", "#!/bin/bash\ndeepspeed train.py \\"),
    "nothing but marks of order": ("ds_config.json", "\ufeff\ufeff"),
}  # fmt: skip


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", "check", str(path), *options],
        capture_output=True, text=True, preexec_fn=limited, timeout=20 * SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def answered(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode in (0, 2, 6), (ran.returncode, ran.stderr[-300:])
    assert "Traceback" not in ran.stderr
    assert ran.stdout or ran.stderr


@pytest.mark.parametrize("what", TEXTS)
def test_any_text_is_answered(tmp_path: Path, what: str) -> None:
    name, text = TEXTS[what]
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    answered(check(path))


PLACES: dict[str, Callable[[Path], None]] = {
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a FIFO": os.mkfifo,
    "an empty folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", PLACES)
def test_any_place_is_answered(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ds_config.json"
    PLACES[what](path)
    ran = check(path)
    answered(ran)
    assert ran.returncode == 2


@pytest.mark.parametrize("named", ["ds_config.json", "folder", "folder/ds_config.json"])
def test_what_may_not_be_read_is_said(tmp_path: Path, named: str) -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("setpriv is missing: root reads everything")
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "ds_config.json", folder / "ds_config.json"):
        path.write_text('{"train_batch_size": 8}')
        path.chmod(0)
    folder.chmod(0)
    dropped = ["-dac_override", "-dac_read_search"]
    rights = [str(setpriv), f"--bounding-set={','.join(dropped)}", f"--inh-caps={','.join(dropped)}"]
    command = [*(rights if os.geteuid() == 0 else []), sys.executable, "-m", "dslaunch", "check", named]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    folder.chmod(0o700)
    assert ran.returncode == 2
    assert ran.stderr == (
        f"dslaunch: {named}: can't be read: Permission denied. Run as a user who may read it (`ls -ld {named}`).\n"
    )
