"""Asks the ranks of other hosts for their stacks, over ssh, and the kernels there how those processes stand.

Only the recorded process is asked: its start time is compared first. The stacks come to the run folder's `ranks`,
which the hosts share, or which the launcher's agents bring here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.remote import on_all, over_ssh
from dslaunch.run.records import RankRecord

_CONNECT_S = 5.0
_LIMIT_S = 15.0
_SCRIPT = """
ask() { # HOST RANK PID START_TIME
  [[ $HOSTNAME == "$1" && -r /proc/$3/stat ]] || return 0
  local stat fields key value caught=0
  stat=$(<"/proc/$3/stat")
  read -ra fields <<<"${stat##*) }"
  [[ ${fields[19]} == "$4" ]] || return 0
  while read -r key value; do [[ $key == SigCgt: ]] && caught=$value; done <"/proc/$3/status"
  # Without a handler SIGUSR1 would end the program.
  ((16#$caught >> 9 & 1)) && kill -USR1 "$3"
  echo "$2 ${fields[0]} $(cat "/proc/$3/wchan" 2>/dev/null)"
}
"""
"""proc(5): after the command's name, field 3 is the state and field 22 the start time."""


@dataclass(frozen=True)
class Seen:
    """A process on another host."""

    state: str
    """The kernel's letter."""
    waits_in: str
    """A function of the kernel; empty or 0: none."""


def ask_hosts(ranks: Sequence[RankRecord]) -> dict[int, Seen]:
    """What is seen of these ranks, by rank; a host that does not answer within 15 s tells nothing."""
    entries = [
        f"ask {each.host} {each.rank} {each.process.pid} {each.process.start_time}"
        for each in ranks
        if each.process and each.host
    ]
    hosts = {each.host for each in ranks if each.host}
    commands = {host: over_ssh(host, ["bash", "-s"], _CONNECT_S) for host in sorted(hosts)}
    answers = on_all(commands, _SCRIPT + "\n".join(entries) + "\n", _LIMIT_S) if commands else {}
    rows = [line.split(maxsplit=2) for answer in answers.values() for line in answer.out.splitlines()]
    return {int(row[0]): Seen(row[1], "".join(row[2:])) for row in rows if len(row) > 1 and row[0].isdigit()}
