"""What a batch script's shell does too early, on the wrong host, or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.lexer import tokens
from dslaunch.files.position import Position
from dslaunch.files.script import ShellScript
from dslaunch.files.shell import Assignment
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.defaults import is_default
from dslaunch.rules.slurm.job import Job, jobs, steps

_RAN = "SLURM 22.05, run"
_PER_TASK = re.compile(r"(?<!\\)\$\{?SLURM_(?:PROCID|NODEID|LOCALID|TASK_PID)\b")
_TASKS = ("--ntasks", "-n", "--ntasks-per-node", "--nodes", "-N")
_RANKS = frozenset({"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MACHINE_RANK"})
_OF_NODE = frozenset({"LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})
_AMONG_ALL = re.compile(
    r"[\"']?\\?\$\{?(?:SLURM_PROCID|OMPI_COMM_WORLD_RANK|PMI_RANK|PMIX_RANK)\}?[\"']?"
)
"""The variables of SLURM, Open MPI and PMI that count the processes of all nodes."""
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0")
_OWN_NAME = re.compile(r"\$\(hostname\b.*|\$HOSTNAME|\$\{HOSTNAME\}|\$SLURMD_NODENAME|`hostname`")
_HOSTNAMES = re.compile(r"""MASTER_ADDR="?(?:\$\(|`)scontrol\s+show\s+hostnames?\b[^|)`]*[)`]""")
_FIX_INNER = (
    "Let each task fill it in: srun bash -c '...' in single quotes (or \\$ in double ones), or a script that "
    "srun starts."
)


@rule(
    "slurm.early-expansion",
    severity="hang",
    raised_by="nobody",
    evidence=f"huggingface/accelerate#2816; {_RAN}",
)
def early(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A task's own number, filled in by the batch script's shell: every node gets 0."""
    for job in jobs(files):
        alone = job.nodes == 1 and job.tasks_per_node == 1
        for command in steps(job):
            words = dict.fromkeys(word for each in command.launchers for word in _words(job, each.at))
            srun = command.launcher("srun")
            several = srun is not None and not (alone and not srun.options.has(*_TASKS))
            for text, at in words if several else ():
                message = (
                    f"{text} is filled in on the first node, before srun starts: every task gets the same."
                )
                if _numbers_nodes(command):
                    message += " The rendezvous numbers the nodes by itself, and doesn't read it."
                    yield Hit(job.file.name, at, message, "Leave it out.", severity="info")
                else:
                    yield Hit(job.file.name, at, message, _FIX_INNER)
        for each in _at_top(job) if not alone else ():
            if each.name in _RANKS and _PER_TASK.search(each.value) and _is_used(job.file, each):
                message = f"{each.name}={each.value} in the batch script is 0 on every node and task."
                numbered = each.name.endswith("NODE_RANK") and any(map(_numbers_nodes, steps(job)))
                message += " The rendezvous numbers the nodes by itself." if numbered else ""
                anew = not numbered and _is_set_anew(files, job, each.name)
                message += f" What srun starts may set {each.name} anew." if anew else ""
                yield Hit(job.file.name, each.at, message, _FIX_INNER, "info" if numbered or anew else None)
        yield from _heredocs(job)
    for file, script in files.scripts():
        yield from _wrapped(file, script)


def _is_set_anew(files: FileSet, job: Job, name: str) -> bool:
    """Whether each task runs a shell script that sets the variable or isn't here, or Python that reads none."""
    words = {each.at: [word.text for word in each.words] for each in job.script.commands}
    first = {at: next((word for word in those if word.endswith(".sh")), "") for at, those in words.items()}
    started = [first.get(each.at) or (each.script.text if each.script else "") for each in steps(job)]
    shells = {file.name.rpartition("/")[2]: file.text for file in files.of("shell")}
    texts = [python.text for _, python in files.pythons()]
    unread = bool(texts) and not any(_READS_RANKS.search(text) or name in text for text in texts)
    return bool(started) and all(
        f"{name}=" in shells.get(each.rpartition("/")[2], f"{name}=") if each.endswith(".sh") else unread
        for each in started
    )


_READS_RANKS = re.compile(
    r"\b(?:deepspeed|accelerate|lightning|Trainer|init_device_mesh)\b|init_process_group\((?![^()]*\brank\s*=)"
)
"""What reads RANK where a script doesn't tell it."""


def _wrapped(file: File, script: ShellScript) -> Iterator[Hit]:
    """`sbatch --wrap="... $SLURM_NODEID"`, which the shell that calls sbatch fills in."""
    lines = file.places
    words = (word for each in script.commands if each.words[0].text == "sbatch" for word in each.words)
    for word in words if not file.inside else ():
        start = lines.offset(word.at)
        typed = _WRAP.match(file.text, start)
        found = _PER_TASK.search(typed[0]) if typed else None
        alone = typed is not None and "SLURM_" not in file.text.replace(typed[0], "")
        if typed and not found and not script.directives and alone:
            found = _OF_JOB.search(typed[0])
        if typed and found:
            message = f"{found[0]} is filled in where sbatch is called, and empty: it stands in double quotes."
            yield Hit(file.name, lines.position(start + found.start()), message, f"Write \\{found[0]}.")


_OF_JOB = re.compile(
    r"(?<!\\)\$\{?SLURM_(?:ARRAY_\w+|JOB_?ID|JOB_NODELIST|JOB_NUM_NODES|NNODES|NODELIST|NTASKS|GPUS_ON_NODE)\}?"
)
"""Variables of the job that is yet to come; a script that is a job itself has its own."""
_WRAP = re.compile(r'--wrap(?:=|\s+)"(?:[^"\\]|\\.)*"', re.DOTALL)


def _is_used(file: File, each: Assignment) -> bool:
    """Whether a variable reaches a program: by `export`, or where its value is taken."""
    before = file.lines[each.at.line - 1][: each.at.column - 1]
    return "export" in before or file.holds(rf"\$\{{?{each.name}\b")


def _numbers_nodes(command: CommandLine) -> bool:
    """Whether torchrun or accelerate meets by a rendezvous other than the static one."""
    backends = (each.options.value("--rdzv-backend", "--rdzv_backend") for each in command.launchers)
    return any(backend not in (None, "static") for backend in backends)


def _words(job: Job, at: Position) -> Iterator[tuple[str, Position]]:
    """Words of the command at `at` that the batch shell fills in with a task's number."""
    for command in job.script.commands:
        if any(word.at == at for word in command.words):
            for word in command.words:
                if _PER_TASK.search(word.text) and not word.late:
                    yield word.text, word.at
            return


def _heredocs(job: Job) -> Iterator[Hit]:
    for command in job.script.commands:
        body = command.heredoc
        match = _PER_TASK.search(body.text) if body and body.expands else None
        if body is not None and match is not None:
            places = job.file.places
            at = places.position(places.offset(body.at) + match.start())
            message = (
                f"{match[0]} in a heredoc is filled in when the text is written: every task gets the same."
            )
            yield Hit(job.file.name, at, message, "Quote the delimiter (<<'EOF'), or write \\$ in it.")


@rule(
    "slurm.local-rank", severity="error", raised_by="torch",
    evidence="the manual page of srun, SLURM 22.05: SLURM_LOCALID",
)  # fmt: skip
def local_rank(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """The number among all tasks taken for the one on the node: from the second node on there is no such GPU."""
    for job in jobs(files):
        for each in job.script.assignments if job.nodes is not None and job.nodes > 1 else ():
            if each.name in _OF_NODE and _AMONG_ALL.fullmatch(each.value) and job.tasks_per_node != 1:
                message = (
                    f"{each.name}={each.value} counts on over {job.nodes} nodes, and the GPUs of each begin at "
                    "0: the second has none of that number."
                )
                by_mpi = "OMPI" in each.value
                own = "OMPI_COMM_WORLD_LOCAL_RANK" if by_mpi else "SLURM_LOCALID"
                yield Hit(job.file.name, each.at, message, f"Write {each.name}=${own}.")


def _at_top(job: Job) -> Iterator[Assignment]:
    """Assignments that the batch script's own shell makes: words of their own, outside of quotes and heredocs."""
    text = job.file.text
    starts = (
        {token.start for token in tokens(text) if token.kind == "word"} if not job.script.problems else set()
    )
    for each in job.script.assignments:
        if job.file.places.offset(each.at) in starts:
            yield each


@rule(
    "slurm.master-address",
    severity="hang",
    raised_by="nobody",
    evidence=f"{_RAN}; torch 2.13 env:// rendezvous",
)
def master_address(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A master address that each node takes for itself: they wait for each other for ever."""
    for job in jobs(files):
        if job.nodes is None or job.nodes < 2:
            continue
        top, lines = {each.at for each in _at_top(job)}, job.file.lines
        for each in job.script.assignments:
            if each.name != "MASTER_ADDR" or is_default(job.file.text, each.at.line):
                continue
            own_host = _OWN_NAME.fullmatch(each.value) and each.at not in top and _inner(job, each)
            if _LOCAL.fullmatch(each.value) or own_host:
                message = f"MASTER_ADDR={each.value} names each node itself, on {job.nodes} nodes."
                fix = 'Set it once: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1).'
                yield Hit(job.file.name, each.at, message, fix)
            elif _HOSTNAMES.match(lines[each.at.line - 1], each.at.column - 1):
                message = f"MASTER_ADDR holds the names of all {job.nodes} nodes, one a line: no address."
                fix = 'Take the first: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1.'
                yield Hit(job.file.name, each.at, message, fix, severity="error")


def _inner(job: Job, each: Assignment) -> bool:
    """Whether the assignment stands in text that srun's tasks read, in single quotes."""
    late = (word for command in job.script.commands for word in command.words if word.late)
    return any(word.at.line == each.at.line for word in late)


@rule(
    "slurm.signal",
    severity="wrong",
    raised_by="nobody",
    evidence=f"the manual page of sbatch, --signal; {_RAN}",
)
def signal(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """--signal and trap that miss each other."""
    for job in jobs(files):
        asked = job.directive("--signal")
        traps = [command for command in job.script.commands if command.words[0].text == "trap"]
        if asked is None:
            continue
        to_shell = re.match(r"R?B:", asked.value.upper()) is not None
        if to_shell and not traps:
            message = (
                f"--signal={asked.value} goes to the batch shell, which has no trap for it, and dies of it."
            )
            yield Hit(job.file.name, asked.at, message, "Add trap 'handler' SIGNAL, or leave B: out.")
        elif traps and not to_shell:
            message = f"--signal={asked.value} goes to the steps alone: the script's trap never runs."
            yield Hit(job.file.name, asked.at, message, f"Write --signal=B:{asked.value}.")
        elif (
            traps and to_shell and not any(command.words[0].text == "wait" for command in job.script.commands)
        ):
            message = (
                "bash runs a trap only once the command in front ends: without & and wait it comes too late."
            )
            yield Hit(job.file.name, traps[0].at, message, "Put & behind srun, and wait after it.")


@rule("slurm.master-port", severity="info", raised_by="nobody", evidence="DeepSpeed#3878, gpt-neox#768")
def master_port(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A fixed port in a job that may share its first node."""
    for job in jobs(files):
        for each in _at_top(job):
            if each.name == "MASTER_PORT" and each.value.isdecimal() and not job.directive("--exclusive"):
                message = f"MASTER_PORT={each.value} is the same for every job: two on one node collide."
                fix = "Take it from the job: MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))."
                yield Hit(job.file.name, each.at, message, fix)
        array = job.directive("--array") is not None and not job.directive("--exclusive")
        for command in job.script.launches if array else ():
            launcher = command.launcher("torchrun")
            port = launcher.options.value("--master-port", "--master_port") if launcher else None
            if launcher and port is not None and port.isdecimal() and port != "0":
                at = launcher.options.position("--master-port", "--master_port")
                message = f"port {port} is the same for every job of the array: two on one node collide."
                fix = "Write --standalone on one node, or make the port of the job's id."
                yield Hit(job.file.name, at, message, fix)
