"""`dslaunch explain --symptom TEXT`: from what a user sees to causes, checks and rules."""

from __future__ import annotations

import re
import time

import pytest

from dslaunch.rules.registry import rules
from dslaunch.rules.symptoms import _patterns, matching, seen, symptoms
from tests.command import CommandLine

MESSAGES = [(symptom.id, message) for symptom in symptoms() for message in symptom.messages]


def varied(message: str) -> str:
    """The message as another run would print it."""
    other = re.sub(r"\d+", lambda match: str(int(match[0]) + 7), message)
    return re.sub(r"(?<![\w<])(?:node\d+)", "gpu-alpha-17", other)


@pytest.mark.parametrize(("symptom", "message"), MESSAGES)
def test_a_message_in_a_log_is_its_symptom(symptom: str, message: str) -> None:
    line = f"\x1b[31m[2026-01-31 10:00:00,123] [ERROR] [rank17]: {varied(message)}\x1b[0m"
    log = f"Epoch 1: 3%\n{line}\nTraceback (most recent call last):\n"
    assert matching(log)[0].id == symptom


@pytest.mark.parametrize(
    ("words", "symptom"),
    [
        ("NCCL timeout", "nccl-timeout"),
        ("exit -9", "exit-minus-9"),
        ("hang at initialisation", "init-hang"),
        ("batch assertion", "batch-assertion"),
        ("OOM only when distributed", "distributed-oom"),
        ("one rank lost", "rank-lost"),
        ("loss spike", "loss-spike"),
        ("low or uneven utilisation", "uneven-utilisation"),
        ("training slower than expected", "slow"),
        ("worse convergence than on one GPU", "worse-convergence"),
        ("irreproducible", "irreproducible"),
        ("checkpoint inconsistent", "checkpoint-inconsistent"),
        ("log flood", "log-flood"),
    ],
)
def test_what_users_say_without_a_message(words: str, symptom: str) -> None:
    assert matching(words)[0].id == symptom


@pytest.mark.parametrize(
    ("words", "symptom"),
    [
        ("all_reduce timed out after 1800 s", "nccl-timeout"),
        ("training gets stuck in allgather after a few steps", "nccl-timeout"),
        ("Script freezes at dist.init_process_group and never continues", "init-hang"),
        ("deepspeed multi node training hangs at start, no error", "init-hang"),
        ("runs on a single gpu but out of memory with 8 gpus", "distributed-oom"),
        ("OOM on 2 nodes but not on one node", "distributed-oom"),
        ("node 3 died during training and the rest is waiting", "rank-lost"),
        ("the loss suddenly jumps from 2 to 8", "loss-spike"),
        ("GPU 0 is at 100% but the others idle", "uneven-utilisation"),
        ("imbalanced GPU load across pipeline stages", "uneven-utilisation"),
        ("8 GPUs are not faster than 1", "slow"),
        ("each step takes twice as long as expected", "slow"),
        ("model does not converge when trained on multiple GPUs", "worse-convergence"),
        ("validation accuracy drops when going from 1 to 8 gpus", "worse-convergence"),
        ("I get different results every time with the same seed", "irreproducible"),
        ("checkpoint is corrupted", "checkpoint-inconsistent"),
        ("the same warning is printed by all ranks thousands of times", "log-flood"),
        ("log file grows to 100 GB", "log-flood"),
    ],
)
def test_other_words_for_the_same(words: str, symptom: str) -> None:
    assert matching(words)[0].id == symptom


TORCHRUN = """E0121 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: {code}) local_rank: 0 \
(pid: 13) of binary: /opt/bin/python
Traceback (most recent call last):
  File "/opt/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.mark.parametrize(
    ("text", "symptom"),
    [
        (TORCHRUN.format(code=-9), "exit-minus-9"),
        (TORCHRUN.format(code=-11), "crash"),
        (TORCHRUN.format(code=-7), "shared-memory"),
        (TORCHRUN.format(code=1), "ended"),
        ("[ERROR] [launch.py:434:sigkill_handler] ['python'] exits with return code = -9", "exit-minus-9"),
        ("[ERROR] [launch.py:434:sigkill_handler] ['python'] exits with return code = 1", "ended"),
        ("CUDA out of memory. Tried to allocate 1 GiB\n" + TORCHRUN.format(code=1), "gpu-oom"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n[rank1]: Connection reset by peer\n", "gpu-oom"),
        ("KeyError: 'LOCAL_RANK'", "no-launcher"),
        ("KeyError: 'labels'", None),
        ("ModuleNotFoundError: No module named 'mpi4py'", "no-launcher"),
        ("ModuleNotFoundError: No module named 'flash_attn'", None),
        ("AttributeError: 'NoneType' object has no attribute 'shape'", None),
        ("RuntimeError: 'depth' must be even", None),
        ("the killer feature of this log\nis that it floods\nno port", None),
    ],
)
def test_numbers_and_names_count_where_they_tell(text: str, symptom: str | None) -> None:
    found = matching(text)
    assert (found[0].id if found else None) == symptom


def test_every_symptom_says_what_to_do_and_names_rules_that_there_are() -> None:
    assert len(symptoms()) >= 25
    for symptom in symptoms():
        assert symptom.causes, symptom.id
        assert symptom.checks, symptom.id
        assert symptom.source, symptom.id
        assert symptom.messages or symptom.words or symptom.exact, symptom.id
        assert all(sum(map(len, parts)) >= 8 for parts, _ in _patterns(symptom)), symptom.id
        assert set(symptom.rules) <= set(rules()), symptom.id


def test_it_prints_causes_checks_and_rules(dslaunch: CommandLine) -> None:
    ran = dslaunch("explain", "--symptom", "AssertionError: Check batch related parameters. 8 != 2 * 1 * 1")
    assert ran.status == 0
    assert "may come from:" in ran.out
    assert "find out:" in ran.out
    assert f"batch.triangle: {rules()['batch.triangle'].summary}" in ran.out


def test_a_text_that_says_nothing_lists_what_is_known(dslaunch: CommandLine) -> None:
    ran = dslaunch("explain", "--symptom", "lorem ipsum")
    assert ran.status == 0
    assert ran.out.startswith("No symptom that is known fits this text.")
    assert all(symptom.title in ran.out for symptom in seen())


def test_a_large_log_is_read_in_bounded_time() -> None:
    log = "step 1 loss 2.0 /a/b/c\n" * 400_000 + "Signal 9 (SIGKILL) received by PID 4\n"
    started = time.process_time()
    assert matching(log)[0].id == "exit-minus-9"
    assert time.process_time() - started < 10
