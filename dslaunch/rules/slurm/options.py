"""The options of `#SBATCH` lines, as SLURM 22.05 to 26.05 know them, and the forms of their values."""

from __future__ import annotations

import re
from functools import cache

_SHORT = {
    "-A": "--account", "-a": "--array", "-b": "--begin", "-C": "--constraint", "-c": "--cpus-per-task",
    "-D": "--chdir", "-d": "--dependency", "-e": "--error", "-F": "--nodefile", "-G": "--gpus", "-H": "--hold",
    "-i": "--input", "-J": "--job-name", "-k": "--no-kill", "-L": "--licenses", "-M": "--clusters",
    "-m": "--distribution", "-N": "--nodes", "-n": "--ntasks", "-O": "--overcommit", "-o": "--output",
    "-p": "--partition", "-Q": "--quiet", "-q": "--qos", "-S": "--core-spec", "-s": "--oversubscribe",
    "-t": "--time", "-v": "--verbose", "-W": "--wait", "-w": "--nodelist", "-x": "--exclude",
}  # fmt: skip
_LONG = """
    --account --acctg-freq --array --autocomplete --batch --bb --bbf --begin --chdir --cluster
    --cluster-constraint --clusters
    --comment --constraint --consolidate-segments --container --container-id --contiguous --core-spec
    --cores-per-socket --cpu-freq --cpus-per-gpu --cpus-per-task --deadline --delay-boot --dependency
    --distribution --error --exclude --exclusive --export --export-file --extra --extra-node-info --get-user-env
    --gid --gpu-bind --gpu-freq --gpus --gpus-per-node --gpus-per-socket --gpus-per-task --gres --gres-flags
    --help --hint --hold --ignore-pbs --input --job-name --kill-on-invalid-dep --licenses --mail-type --mail-user
    --mcs-label --mem --mem-bind --mem-per-cpu --mem-per-gpu --mincpus --network --nice --no-kill --no-requeue
    --nodefile --nodelist --nodes --ntasks --ntasks-per-core --ntasks-per-gpu --ntasks-per-node
    --ntasks-per-socket --open-mode --output --overcommit --oversubscribe --parsable --partition --power --prefer
    --priority --profile --propagate --qos --quiet --reboot --requeue --reservation --resv-ports --segment --signal
    --sockets-per-node --spread-job --spread-segments --stepmgr --switches --tasks-per-node --test-only
    --thread-spec --threads-per-core --time --time-min --tmp --tres-bind --tres-per-task --uid --usage
    --use-min-nodes --verbose --version --wait --wait-all-nodes --wckey --wrap --x11
    --context --external --mem-update --ntasks-per-tres --oom-kill-step --resources --runtime"""
OPTIONS = frozenset(_LONG.split())
_SRUN = """
    --accel-bind --account --acctg-freq --async --autocomplete --bb --bbf --bcast --bcast-exclude --begin
    --bell --chdir --cluster --cluster-constraint --clusters --comment --compress --consolidate-segments
    --constraint --container --container-id --context --contiguous --core-spec --cores-per-socket
    --cpu-bind --cpu-freq --cpus-per-gpu --cpus-per-task --deadline --debugger-test --delay-boot --dependency
    --disable-status --distribution --epilog --error --exact --exclude --exclusive --export --export-file
    --external-launcher --extra --extra-node-info --get-user-env --gid --gpu-bind --gpu-freq --gpus
    --gpus-per-node --gpus-per-socket --gpus-per-task --gres --gres-flags --help --het-group --hint --hold
    --ignore-signals --immediate --input --interactive --job-name --jobid --kill-on-bad-exit --label
    --licenses --mail-type --mail-user --mcs-label --mem --mem-bind --mem-per-cpu --mem-per-gpu
    --mem-update --mincpus --mpi --msg-timeout --multi-prog --network --nice --no-allocate --no-bell --no-kill
    --nodefile --nodelist --nodes --ntasks --ntasks-per-core --ntasks-per-gpu --ntasks-per-node
    --ntasks-per-socket --ntasks-per-tres --oom-kill-step --open-mode --output --overcommit --overlap
    --oversubscribe --pack-group --parsable --partition --power --prefer --preserve-env --priority
    --profile --prolog --propagate --pty --qos --quiet --quit-on-interrupt --reboot --relative
    --reservation --resources --restart-dir --resv-ports --runtime --segment --send-libs --share --signal
    --slurmd-debug --sockets-per-node --spread-job --spread-segments --stepmgr --switches --task-epilog
    --task-prolog --tasks-per-node --test-only --thread-spec --threads --threads-per-core --time
    --time-min --tmp --treewidth --tres-bind --tres-per-task --uid --unbuffered --usage --use-min-nodes --verbose
    --version --wait --wait-for-children --wckey --whole --x11 --cpu_bind"""
SRUN_OPTIONS = frozenset(_SRUN.split())
"""Those of srun, 22.05 to 26.05."""

_TIME = r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE"
_SIZE = r"\d+[KMGTkmgt]?[Bb]?"
BARE = frozenset({
    "--consolidate-segments", "--contiguous", "--help", "--hold", "--ignore-pbs", "--no-requeue", "--overcommit",
    "--oversubscribe", "--parsable", "--quiet", "--reboot", "--spread-job", "--stepmgr",
    "--test-only", "--usage", "--use-min-nodes", "--verbose", "--version", "--wait",
})  # fmt: skip
"""Options without a value."""
OPTIONAL = frozenset({
    "--exclusive", "--get-user-env", "--nice", "--no-kill", "--oom-kill-step", "--propagate", "--requeue",
    "--resv-ports", "--spread-segments", "--x11",
})  # fmt: skip
"""Options whose value, where there is one, comes behind `=`."""
_COUNT = re.compile(r"\d+")
_PER_GPU = re.compile(r"(?:[A-Za-z][\w.-]*(?::\d+)?|\d+)(?:,(?:[A-Za-z][\w.-]*(?::\d+)?|\d+))*")
_RESOURCE = r"[A-Za-z][\w/.-]*(?::[\w.-]+){0,2}"
_GRES = re.compile(rf"{_RESOURCE}(?:,{_RESOURCE})*")
_MAILS = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(?:_(?:50|80|90))?|ARRAY_TASKS"
_SIGNALS = "HUP|INT|QUIT|ABRT|KILL|ALRM|TERM|USR1|USR2|URG|CONT|STOP|TSTP|TTIN|TTOU"
_JOB = r"\d+(?:_(?:\d+|\*))?(?:\+\d+)?"
_AFTER = rf"(?:after(?:any|ok|notok|corr|burstbuffer)?:)?{_JOB}(?::{_JOB})*"
_SPREAD = r"block|cyclic|fcyclic|arbitrary|plane(?:=\d+)?|\*"
_WHEN = re.compile(
    r"now(?:[+-].*)?|today|tomorrow|midnight|noon|fika|teatime|elevenses|uts\d+|\d.*", re.IGNORECASE
)
_WHEN_WORDS = "such as now+1hour, tomorrow, 16:00 or 2030-01-31T16:00"
FORMS = {
    "--time": (re.compile(_TIME, re.IGNORECASE), "minutes, minutes:seconds, hours:minutes:seconds or days-hours"),
    "--time-min": (re.compile(_TIME, re.IGNORECASE), "minutes, hours:minutes:seconds or days-hours"),
    "--nodes": (re.compile(r"\d+[kKmM]?(-\d+[kKmM]?)?(:\d+)?(,\d.*)?|[\w/.-]+\.txt"), "a number, or `least-most`"),
    **dict.fromkeys(
        ("--ntasks", "--ntasks-per-node", "--tasks-per-node", "--cpus-per-task"),
        (re.compile(r"0*[1-9]\d*"), "a number from 1 on"),
    ),
    "--mem": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--mem-per-cpu": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--mem-per-gpu": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--gres": (_GRES, "name:count or name:type:count, such as gpu:8"),
    "--gpus": (_PER_GPU, "a number, or type:number"),
    "--gpus-per-node": (_PER_GPU, "a number, or type:number"),
    "--gpus-per-task": (_PER_GPU, "a number, or type:number"),
    "--gpus-per-socket": (_PER_GPU, "a number, or type:number"),
    "--exclusive": (re.compile(r"(?:user|mcs|topo)?", re.IGNORECASE), "user, mcs or topo, or nothing"),
    "--mail-type": (
        # words that it doesn't know are passed over beside one that it knows
        re.compile(rf"(?:[^,]*,)*(?:{_MAILS})(?:,[^,]*)*", re.IGNORECASE), "words such as BEGIN,END,FAIL or ALL",
    ),
    "--signal": (
        re.compile(rf"(?:[RB]+:)?(?:\d+|(?:SIG)?(?:{_SIGNALS}))(?:@\d+)?", re.IGNORECASE), "B:NAME@SECONDS",
    ),
    "--dependency": (
        re.compile(rf"(?:{_AFTER}|singleton)(?:[,?](?:{_AFTER}|singleton))*", re.IGNORECASE),
        "such as afterok:123, afterany:1:2 or singleton",
    ),
    "--begin": (_WHEN, _WHEN_WORDS),
    "--deadline": (_WHEN, _WHEN_WORDS),
    "--switches": (re.compile(r"\d+(?:@.+)?"), "a number"),
    "--hint": (
        re.compile(r"compute_bound|memory_bound|(?:no)?multithread|help"),
        "compute_bound, nomultithread or the like",
    ),
    "--distribution": (
        re.compile(rf"(?:{_SPREAD})(?::(?:{_SPREAD})){{0,2}}(?:,(?:no)?pack)?", re.IGNORECASE),
        "block, cyclic or plane",
    ),
    "--kill-on-invalid-dep": (re.compile(r"yes|no", re.IGNORECASE), "yes or no"),
    "--profile": (
        re.compile(r"(?:all|none|energy|task|lustre|network|filesystem|interconnect|,)+", re.IGNORECASE),
        "all, none, task or the like",
    ),
    **dict.fromkeys(
        ("--ntasks-per-socket", "--ntasks-per-core", "--ntasks-per-gpu", "--core-spec", "--mincpus",
         "--cpus-per-gpu"), (_COUNT, "a number"),
    ),
    "--array": (re.compile(r"\[?[\d,:-]+(%\d*)?\]?"), "indices such as 0-7 or 1,3,5, and %most-at-once"),
}  # fmt: skip
"""Values that sbatch takes, and how a message names them."""


@cache
def long_name(name: str) -> str:
    """The full name of an option: of its letter, or of the only one that begins like this; empty where none is."""
    if not name.startswith("--"):
        return _SHORT.get(name, "")
    matches = [option for option in OPTIONS if option.startswith(name)]
    return name if name in OPTIONS else matches[0] if len(matches) == 1 else ""
