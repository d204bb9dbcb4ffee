"""Components whose layers attend together, such as pi0's action expert in its LLM: one component to the runtime.

Where an edge joins by `shared_attention`, the one that it leads to is a guest of the one that it leaves: the
host's module makes both, its engine trains both, and the guest has no messages of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dslaunch.errors import ConfigError, listed

_JOIN = "shared_attention"
_ALIKE = ("train", "lr", "weight_decay")
"""Settings that one engine has one value for."""
_CUT_ALIKE = (
    "tp", "pp", "vpp", "dp", "rank_offset", "layers_per_stage", "micro_batch", "num_microbatches", "zero",
    "offload", "recompute",
)  # fmt: skip
_Specs = Mapping[str, dict[str, Any]]
_Edges = Iterable[Mapping[str, Any]]


def guests_of(name: str, edges: _Edges) -> list[str]:
    """The components that the module of `name` makes besides its own layers."""
    return [edge["to"] for edge in edges if edge["join"] == _JOIN and edge["from"] == name]


def executed(specs: _Specs, edges: _Edges) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Components and edges as the runtime sees them: without guests, and what joins them to their hosts."""
    guests = {edge["to"] for edge in edges if edge["join"] == _JOIN}
    left = {name: spec for name, spec in specs.items() if name not in guests}
    return left, [dict(edge) for edge in edges if edge["join"] != _JOIN]


def streams_of(name: str, specs: _Specs, edges: _Edges, tokens: int) -> list[tuple[int, int]]:
    """(tokens, width) of a sample's streams between the stages of `name`: its own `tokens`, then its guests'."""
    guests = [specs[guest] for guest in guests_of(name, edges)]
    own = (tokens, int(specs[name]["hidden"]))
    return [own, *((int(spec["passes"] * spec["tokens"]), int(spec["hidden"])) for spec in guests)]


def check_coupled(specs: _Specs, edges: _Edges) -> None:
    """Refuse a guest that its host's module can't make.

    Raises:
        ConfigError: a host without a module; a guest that has one, has other edges, or trains otherwise.
    """
    for edge in edges:
        if edge["join"] == _JOIN:
            host, guest = edge["from"], edge["to"]
            _check_host(host, guest, specs)
            _check_guest(host, guest, specs)
            _check_edges(edge, edges)


def coupling_faults(edges: _Edges, layouts: Mapping[str, object]) -> list[str]:
    """Guests that are laid out otherwise than their hosts, among `layouts`: a sentence each."""
    found = []
    for edge in edges:
        host, guest = edge["from"], edge["to"]
        if edge["join"] != _JOIN or not {host, guest} <= set(layouts):
            continue
        ends = layouts[guest], layouts[host]
        apart = [key for key in _CUT_ALIKE if getattr(ends[0], key) != getattr(ends[1], key)]
        if apart:
            first, second = (
                ", ".join(f"{key} {_in_words(getattr(end, key))}" for key in apart) for end in ends
            )
            found.append(
                f"strategy.{guest} has {first}, strategy.{host} has {second}; they attend layer by layer, and "
                "dslaunch.runtime trains them as one component: give both the same"
            )
    return found


def _in_words(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_host(host: str, guest: str, specs: _Specs) -> None:
    if specs[host]["arch"] != "decoder" or not specs[host].get("module"):
        raise ConfigError(
            f"model.edges: {host} -> {guest} joins by '{_JOIN}', for which dslaunch.runtime has no layers of its "
            f"own. Name a factory in model.components.{host}.module, of a decoder, that makes both; or give a "
            "training script: script=PATH."
        )


def _check_guest(host: str, guest: str, specs: _Specs) -> None:
    spec, key = specs[guest], f"model.components.{guest}"
    if spec["arch"] != "transformer" or not spec["tokens"]:
        raise ConfigError(
            f"{key}: it attends in the layers of {host}, and dslaunch.runtime needs to know over how many tokens: "
            "give it `arch: transformer` and `tokens`."
        )
    if spec.get("module"):
        raise ConfigError(
            f"{key}.module: found '{spec['module']}'; the module of {host} makes both, since their layers attend "
            "together. Leave it out."
        )
    for setting in _ALIKE:
        if spec[setting] != specs[host][setting]:
            raise ConfigError(
                f"{key}.{setting} is {_shown(spec[setting])}, model.components.{host}.{setting} is "
                f"{_shown(specs[host][setting])}; their layers attend together, and dslaunch.runtime trains both "
                "by one engine. Give both the same."
            )


def _check_edges(own: Mapping[str, Any], edges: _Edges) -> None:
    host, guest = own["from"], own["to"]
    others = [edge for edge in edges if edge is not own and guest in (edge["from"], edge["to"])]
    if others:
        shown = listed(f"{edge['from']} -> {edge['to']}" for edge in others)
        raise ConfigError(
            f"model.edges: {shown}: {guest} attends in the layers of {host}, whose module takes its tokens from "
            "the batch and judges what it gives. Leave these edges, and what nothing else joins then, out."
        )


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)
