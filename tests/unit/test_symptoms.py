"""`dslaunch explain --symptom TEXT`: from what a user sees to causes, checks and rules."""

from __future__ import annotations

import re
import time
from importlib import resources

import pytest

from dslaunch.files import yaml_text
from dslaunch.rules.registry import rules
from dslaunch.rules.symptoms import _pattern, matching, seen, symptoms
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
        ("stuck at initializing torch distributed", "init-hang"),
        ("it hangs", "nccl-timeout"),
        ("nothing happens after launching", "init-hang"),
        ("all gpus 0% utilization", "uneven-utilisation"),
        ("training diverges", "loss-spike"),
        ("slow on two nodes", "slow"),
        ("different loss every run", "irreproducible"),
        ("cannot resume", "checkpoint-inconsistent"),
        ("duplicate log lines", "log-flood"),
        ("host out of memory", "host-memory"),
        ("OOM killer", "exit-minus-9"),
        ("training never starts", "init-hang"),
        ("training freezes after the first epoch", "nccl-timeout"),
        ("it seems to be a deadlock", "nccl-timeout"),
        ("checkpoint saving hangs", "nccl-timeout"),
        ("GPU util is 30% on half of the GPUs", "uneven-utilisation"),
        ("non-deterministic results", "irreproducible"),
        ("the evaluation metric is different between runs", "irreproducible"),
        ("resumed from checkpoint and the loss is higher", "checkpoint-inconsistent"),
        ("checkpoint cannot be loaded after changing the number of GPUs", "checkpoint-inconsistent"),
        ("every rank prints the same log line", "log-flood"),
        ("wandb has 8 runs", "log-flood"),
        ("works on one GPU but OOM on multi GPU", "distributed-oom"),
        ("loss does not decrease", "worse-convergence"),
        ("slow data loading", "slow"),
        ("first step takes 10 minutes", "slow"),
        ("memory leak", "gpu-oom"),
        ("exit code -11", "crash"),
        ("return code = 1", "ended"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ds_config.json'", "missing-file"),
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
        ("RuntimeError: The size of tensor a (0) must match the size of tensor b (4096)", "zero3-empty"),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", None),
        ("srun: error: node03: task 5: Killed", "exit-minus-9"),
        ("AssertionError: 8 is not divisible by 3", "moe.experts"),
        ("AssertionError: the number of heads 32 is not divisible by tensor parallel size 3", None),
        ("AssertionError", None),
        ("AssertionError: last epoch number of samples exceeded max value.", None),
        (
            "AssertionError: {'id': 3, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0, 'shape': (0,)",
            "script.zero-init-copies",
        ),
        ("ValueError: 'foo' is not a valid Color", None),
        ("error: --x requires --y to be enabled", None),
        ("output tensor size must be equal to world_size times input tensor size", None),
        ("You can't train a model that has been loaded on a different device than that of training", None),
        ("RuntimeError: Timed out initializing process group in store based barrier on rank: 1", "init-hang"),
        ("the killer feature of this log\nis that it floods\nno port", None),
    ],
)
def test_numbers_and_names_count_where_they_tell(text: str, symptom: str | None) -> None:
    found = matching(text)
    assert (found[0].id if found else None) == symptom


_STARTED = "[INFO] [comm.py:668:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl\n"


@pytest.mark.parametrize(
    ("behind", "symptoms_found"),
    [
        ("", ["init-hang"]),
        ("RuntimeError: CUDA error: invalid device ordinal\n", ["device-ordinal"]),
        ("[2026-01-31 10:00:05,000] [INFO] step=10, skipped=0, lr=[1e-4], mom=[[0.9, 0.999]]\n", []),
        (
            "ssh: connect to host worker-2 port 22: refused\nexits with return code = 1\n",
            ["ssh-hosts", "ended"],
        ),
    ],
)
def test_what_a_healthy_run_prints_too_tells_only_as_the_last_line(
    behind: str, symptoms_found: list[str]
) -> None:
    assert [symptom.id for symptom in matching(_STARTED + behind)] == symptoms_found


HEALTHY = """[runner.py:202] Unable to find hostfile, will proceed with training with local resources only.
[INFO] [comm.py:668:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl
UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.
{'loss': 1.3212, 'grad_norm': 2.1, 'learning_rate': 1.05e-06, 'epoch': 0.0}
 iteration 1/ 100 | consumed samples: 256 | elapsed time per iteration (ms): 9000.2 | throughput per GPU: 201.2 | \
learning rate: 1.0E-06 | global batch size: 256 | lm loss: 1.081E+01 | loss scale: 1.0 | grad norm: 30.1 | \
number of skipped iterations: 0 | number of nan iterations: 0 |
"""


@pytest.mark.parametrize(
    ("error", "symptom"),
    [
        ("RuntimeError: CUDA error: invalid device ordinal", "device-ordinal"),
        ("RuntimeError: Error building extension 'cpu_adam'", "op-build"),
        ("ssh: connect to host worker-2 port 22: Connection refused", "ssh-hosts"),
        ("KeyError: 'RANK'", "no-launcher"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("remote process exited or there was a network error", "rank-lost"),
    ],
)
def test_an_error_goes_before_what_a_run_says_that_goes_on(error: str, symptom: str) -> None:
    assert matching(f"{HEALTHY}{error}\n")[0].id == symptom


def test_every_symptom_says_what_to_do_and_names_rules_that_there_are() -> None:
    assert len(symptoms()) >= 25
    for symptom in symptoms():
        assert symptom.causes, symptom.id
        assert symptom.checks, symptom.id
        assert symptom.source, symptom.id
        assert symptom.messages or symptom.words or symptom.exact, symptom.id
        assert all(sum(map(len, parts)) >= 8 for parts, _ in map(_pattern, symptom.messages)), symptom.id
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


@pytest.mark.parametrize("name", ["symptoms.yaml", "raised.yaml"])
def test_no_key_of_a_symptom_stands_twice(name: str) -> None:
    text = (resources.files("dslaunch.rules") / name).read_text(encoding="utf-8")
    assert yaml_text.parse(text).problems == ()
