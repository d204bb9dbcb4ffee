"""The options of `#SBATCH` lines, as SLURM 22.05 to 25.05 know them, and the forms of their values."""

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
    --account --acctg-freq --array --batch --bb --bbf --begin --chdir --cluster --cluster-constraint --clusters
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
    --use-min-nodes --verbose --version --wait --wait-all-nodes --wckey --wrap --x11"""
OPTIONS = frozenset(_LONG.split())

_TIME = r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE"
_SIZE = r"\d+(\.\d+)?[KMGTkmgt]?[Bb]?"
FORMS = {
    "--time": (re.compile(_TIME, re.IGNORECASE), "minutes, minutes:seconds, hours:minutes:seconds or days-hours"),
    "--time-min": (re.compile(_TIME, re.IGNORECASE), "minutes, hours:minutes:seconds or days-hours"),
    "--nodes": (re.compile(r"\d+[kKmM]?(-\d+[kKmM]?)?(:\d+)?(,.*)?|[\w/.-]+\.txt"), "a number, or `least-most`"),
    "--ntasks": (re.compile(r"\d+"), "a number"),
    "--ntasks-per-node": (re.compile(r"\d+"), "a number"),
    "--tasks-per-node": (re.compile(r"\d+"), "a number"),
    "--cpus-per-task": (re.compile(r"\d+"), "a number"),
    "--mem": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--mem-per-cpu": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--mem-per-gpu": (re.compile(_SIZE), "a number with K, M, G or T"),
    "--array": (re.compile(r"[\d,:-]+(%\d+)?"), "indices such as 0-7 or 1,3,5, and %most-at-once"),
}  # fmt: skip
"""Values that sbatch takes, and how a message names them."""


@cache
def long_name(name: str) -> str:
    """The full name of an option: of its letter, or of the only one that begins like this; empty where none is."""
    if not name.startswith("--"):
        return _SHORT.get(name, "")
    matches = [option for option in OPTIONS if option.startswith(name)]
    return name if name in OPTIONS else matches[0] if len(matches) == 1 else ""
