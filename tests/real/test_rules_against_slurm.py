"""What our rules say of #SBATCH lines, held against the real sbatch."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from dslaunch.files.fileset import read_fileset
from dslaunch.rules.registry import rules
from dslaunch.rules.settings import Settings
from tests.cases.load import Case, all_cases
from tests.real.slurm import SlurmCluster
from tests.real.slurm import slurm as slurm  # a fixture

CASES = [case for case in all_cases() if case.rule.startswith("slurm.") and "job.sbatch" in case.files]
_REFUSED = frozenset({
    "slurm.gpus-per-task", "slurm.het-array", "slurm.needs", "slurm.script-form", "slurm.stray-word",
    "slurm.unknown-option", "slurm.value",
})  # fmt: skip
_OF_THE_SITE = ("node configuration is not available", "invalid partition specified")
"""What another cluster would take."""
LINES = (
    "--nodes=2", "-N 2", "-N2", "--nodes=1-3", "--nodes=two", "--node=2", "--ntasks=8",
    "--ntasks-per-node=8", "--tasks-per-node=4", "--ntask-per-node=8", "--ntasks-per-nodes=8", "--time=10",
    "--time=1:00", "--time=00:30:00", "--time=0-00:30", "--time=48h", "--time=1d", "-t 5", "--mem=4G",
    "--mem=4096", "--mem=10Q", "--mem-per-cpu=1GB", "--gpus-per-node=8", "--gres=gpu:4", "--gpu-per-node=8",
    "--gpu=8", "--cpus-per-task=4", "-c4", "--cpus-per-task=four", "--exclusive", "--requeue",
    "--job-name=x", "-J x", "--array=0-3", "--array=0-3%2", "--array=a", "--output=%j.out", "--frob=3",
    "--open-mode=append", "--signal=B:USR1@60", "--partition=train", "--chdir=/tmp", "--no-requeue",
    "--export=ALL", "--hint=nomultithread",
)  # fmt: skip
"""Options that this cluster can serve, among them those that sbatch doesn't read."""


FORMS = (
    "--mem=512 GB", "--mem=512G # all", "--nodes=2 - 4", "--nodes=2,", "--job-name=my job", "--job-name='my job'",
    "--gres=gpu:a100:8", "--gres=gpu=8", "--gres=8", "--gpus-per-node=8:a100", "--gpus=a100", "--time=2 days",
    "--time=1-12:00", "--mem=1.5T", "--mem=512GiB", "--exclusive=yes", "--exclusive=user", "--exclusive true",
    "--mail-type=ALWAYS", "--mail-type=BEGIN,END", "--array=1-10%", "--array=[1-10]", "--signal=SIGUSR1@60",
    "--signal=USR1@2m", "--begin=notime", "--begin=now+1hour", "--deadline=foo", "--switches=x", "--reboot=yes",
    "--hint=foo", "--distribution=blocks", "--kill-on-invalid-dep=maybe", "--profile=foo", "--core-spec=x",
    "--mincpus=a", "-t=10", "-N=2", "-J=x", "-c8 extra", "nodes=2", "\u2014nodes=2", "--comment=a b",
    "--comment='a b' --nodes=2", "-N2 -n4 -t 10 #all", "--ntasks-per-socket=a", "--export=NONE",
    "--gpus-per-task=1", "--gpus-per-task=1 --ntasks=8", "--gpus-per-task=1 --nodes=1", "--ntasks-per-gpu=1",
    "--ntasks-per-gpu=1 --gres=gpu:8", "--gpus-per-socket=1", "--gpus-per-socket=1 --sockets-per-node=2",
    "--mem-per-gpu=4G", "--mem-per-gpu=4G --gpus=1", "--cpus-per-task=2 --cpus-per-gpu=2 --gpus=1",
    "--dependency=afterokay:1", "--dependency=afterok:1", "--dependency=after:1+5", "--dependency=afterok",
    "--dependency=singleton", "--dependency=afterok:1,afterany:2", "--dependency=1", "--dependency=after:abc",
    "--gpus=4 --nodes=8", "--nodes=4-2", "--ntasks=0", "--cpus-per-task=0", "--ntasks-per-node=0",
)  # fmt: skip
"""Lines in the forms that people write, each shown to sbatch alone."""


def refused_by_us(name: str, text: str) -> list[str]:
    """Our errors that sbatch itself raises."""
    files, known = read_fileset({name: text}), Settings()
    found = ((rule, hit) for rule in rules().values() for hit in rule.check(None, files, known))
    return [hit.message for rule, hit in found if rule.id in _REFUSED]


def refused_by_sbatch(slurm: SlurmCluster, folder: Path, text: str) -> str:
    """What sbatch says where it doesn't take the script; empty where it does."""
    script = folder / "job.sbatch"
    script.write_bytes(text.encode())
    done = subprocess.run(
        ["sbatch", "--test-only", str(script)], env=slurm.environ, cwd=folder, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    of_the_site = any(text in done.stderr for text in _OF_THE_SITE)
    return done.stderr.strip() if done.returncode and not of_the_site else ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.name}")
def test_case_is_judged_as_sbatch_judges_it(slurm: SlurmCluster, tmp_path: Path, case: Case) -> None:
    text = case.files["job.sbatch"]
    raised = refused_by_sbatch(slurm, tmp_path, text)
    assert bool(refused_by_us("job.sbatch", text)) == bool(raised), raised


def test_generated_directives_are_judged_as_sbatch_judges_them(slurm: SlurmCluster, tmp_path: Path) -> None:
    chance, seen = random.Random(5), [0, 0]
    for _ in range(150):
        options = chance.sample(LINES, chance.choice([1, 1, 2]))
        text = "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + "hostname\n"
        raised = refused_by_sbatch(slurm, tmp_path, text)
        assert bool(refused_by_us("job.sbatch", text)) == bool(raised), (options, raised)
        seen[bool(raised)] += 1
    print(f"{sum(seen)} scripts: {seen[0]} taken, {seen[1]} refused by both")
    assert min(seen) > 20


def test_forms_are_judged_as_sbatch_judges_them(slurm: SlurmCluster, tmp_path: Path) -> None:
    for line in FORMS:
        text = f"#!/bin/bash\n#SBATCH {line}\nhostname\n"
        raised = refused_by_sbatch(slurm, tmp_path, text)
        assert bool(refused_by_us("job.sbatch", text)) == bool(raised), (line, raised)


@pytest.mark.parametrize(("option", "refused"), [("--ntasks-per-nodes=8", True), ("--cpus-per-ta=1", False)])
def test_a_misspelt_option_of_srun_is_refused(slurm: SlurmCluster, option: str, refused: bool) -> None:
    done = subprocess.run(
        ["srun", "--immediate=5", option, "true"], env=slurm.environ, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert ("unrecognized option" in done.stderr) == refused, done.stderr
    files = read_fileset({"run.sh": f"#!/bin/bash\nsrun {option} python train.py\n"})
    assert bool(list(rules()["slurm.srun-option"].check(None, files, Settings()))) == refused


@pytest.mark.parametrize(("each", "refused"), [(1, True), (8, False)])
def test_a_step_has_no_more_tasks_than_its_job_has_cpus(
    slurm: SlurmCluster, tmp_path: Path, each: int, refused: bool
) -> None:
    """What `launcher.slurm-allocation` says of the srun of deepspeed --launcher slurm."""
    done = subprocess.run(
        ["salloc", "--nodes=2", f"--ntasks-per-node={each}", "srun", "-n", "16", "--immediate=5", "true"],
        env=slurm.environ, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ("More processors requested than permitted" in done.stderr) == refused, done.stderr
    assert bool(done.returncode) == refused, done.stderr
