"""The hosts of an attempt over ssh: a spare one takes the place, and so the ranks, of one that is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dslaunch.launch.steps import Execute
from dslaunch.planfile import Plan
from dslaunch.run.causes import Ending

_NAME = "DSLAUNCH_HOSTS"
_AGENTS = "dslaunch.launch.remote"
"""The program that starts an agent on each host."""


@dataclass(frozen=True)
class Hosts:
    """HOST=DEVICES words in rank order, and the hosts that wait."""

    words: tuple[str, ...]
    spares: tuple[str, ...]
    per_node: int

    @classmethod
    def of(cls, step: Execute, plan: Plan) -> Hosts:
        """Of the launch over ssh through agents; other launchers choose their hosts themselves."""
        through_agents = _AGENTS in step.argv
        words = tuple(step.env[_NAME].split()) if through_agents else ()
        return cls(words, plan.supervision.spares if through_agents else (), plan.cluster.gpus_per_node)

    def variables(self) -> Mapping[str, str]:
        """What the launcher reads."""
        return {_NAME: " ".join(self.words)} if self.words else {}

    def without(self, ending: Ending) -> Hosts:
        """A spare host in place of the one where `ending` began, where one waits and the other is known."""
        node = self._node(ending)
        if node is None or not self.spares:
            return self
        _, _, devices = self.words[node].partition("=")
        words = (*self.words[:node], f"{self.spares[0]}={devices}", *self.words[node + 1 :])
        return replace(self, words=words, spares=self.spares[1:])

    def host_of(self, ending: Ending) -> str:
        """Name of the host where `ending` began; empty where that is not known."""
        node = self._node(ending)
        return "" if node is None else self.words[node].partition("=")[0]

    def changed(self, after: Hosts) -> str:
        """What changed, in words; empty where nothing did."""
        pairs = [(old, new) for old, new in zip(self.words, after.words, strict=True) if old != new]
        return "".join(f", on {new.rstrip('=')} in place of {old.rstrip('=')}" for old, new in pairs)

    def _node(self, ending: Ending) -> int | None:
        """Its number: of the rank where it began, or else of the host that a line names."""
        if not self.words:
            return None
        if ending.rank is not None:
            return ending.rank // self.per_node
        names = [word.partition("=")[0] for word in self.words]
        said = [each.line for each in ending.evidence]
        return next((at for at, name in enumerate(names) if any(f" {name}: " in line for line in said)), None)
