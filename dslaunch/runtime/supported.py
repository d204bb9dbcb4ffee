"""Which models the runtime executes, and the refusal of every other one.

A component's setting that the modules do not know is refused unless it is off, so that a model that the
planner can describe is never trained as another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from dslaunch.errors import ConfigError, listed
from dslaunch.runtime.coupled import check_coupled, coupling_faults, executed, streams_of

Spec = dict[str, Any]
"""A component as `dslaunch.schema` validated it, out of plan.json."""

_LAYERED = {"layers", "hidden", "heads", "head_dim", "ffn", "gated_mlp"}
_EXECUTED = {
    "decoder": _LAYERED
    | {"kv_heads", "vocab", "tied_embeddings", "norm", "norm_eps", "qkv_bias", "out_bias", "mlp_bias", "position"}
    | {"max_positions", "rope_theta"},
    "vit": _LAYERED
    | {"patch", "image", "channels", "class_token", "registers", "patch_bias", "pre_norm", "post_norm"}
    | {"layer_scale", "attention_pooling"},
    "mlp": {"dims", "bias", "norm"},
}
"""By architecture: settings that the modules follow, whatever their value."""
_EVERYWHERE = {"train": ("all", "nothing"), "passes": (1,)}
_ONE_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "decoder": _EVERYWHERE,
    "vit": _EVERYWHERE
    | {"norm": ("layernorm",), "position": ("learned",), "temporal_patch": (1,)}
    | {"qkv_bias": (True,), "out_bias": (True,), "mlp_bias": (True,)},
    "mlp": _EVERYWHERE | {"merge": (1,), "categories": (1,), "norm_kind": ("layernorm",)},
}
"""By architecture: settings of which the modules follow some values."""
_ELSEWHERE = {"arch", "lr", "weight_decay", "module", "module_args", "weights"}
_OWN = {"train": ("all", "nothing")}
"""Settings of which a component with a module of its own follows some values; its factory judges the others."""
_JOINS = ("sequence", "channel", "add")
_EDGE = {"from", "to", "tokens", "join", "from_layer"}
_SCRIPT = "Give a training script of your own: script=PATH."


def check_model(specs: dict[str, Spec], edges: list[dict[str, Any]]) -> None:
    """Refuse a graph that the runtime does not execute.

    Raises:
        ConfigError: an architecture, a setting, a join or a way of edges that the modules lack.
    """
    left, between = executed(specs, edges)
    for name, spec in specs.items():
        _check_component(name, spec, guest=name not in left)
    check_coupled(specs, edges)
    specs, edges = left, between
    trunk, judge = trunk_of(specs), judge_of(specs, edges)
    for name, spec in specs.items():
        if spec["arch"] == "mlp" and all(edge["to"] != name for edge in edges):
            raise ConfigError(f"model.components.{name}: no edge leads to it. Add one to model.edges.")
        if name not in (trunk, judge) and all(edge["from"] != name for edge in edges):
            raise ConfigError(f"model.components.{name}: no edge leaves it. Add one to model.edges.")
    for edge in edges:
        _check_edge(edge, specs, trunk, judge)
    for edge in edges:
        tokens = output_tokens(edge["from"], specs, edges)
        if edge["tokens"] != tokens:
            raise ConfigError(f"{_shown(edge)} says {edge['tokens']} tokens, but {edge['from']} gives {tokens}.")


def check_weights(specs: Mapping[str, Spec], weights: str, edges: list[dict[str, Any]]) -> None:
    """Refuse weights for a component that has no names for them.

    Args:
        weights: `model.weights`, for all components that name none of their own.
    """
    for name in executed(specs, edges)[0]:
        if weights and not is_own(name, specs):
            raise ConfigError(
                f"model.weights: found '{weights}'; dslaunch.runtime reads weights into modules of their own "
                f"(model.components.{name}.module), and starts its own from random ones or from a checkpoint "
                "(checkpoint.load=DIR). Leave it empty, or give script=PATH."
            )


class Cut(Protocol):
    """What a layout is asked for here; a plan's and a planner's both have it."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def vpp(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def layers_per_stage(self) -> tuple[int, ...]: ...
    @property
    def zero(self) -> int: ...
    @property
    def rank_offset(self) -> int: ...
    @property
    def ranks(self) -> int: ...


def cut_faults(
    specs: dict[str, Spec], edges: list[dict[str, Any]], layouts: Mapping[str, Cut], precision: str, seq_len: int
) -> list[str]:
    """Why the runtime can't cut a model as `layouts` say, by component: a sentence each.

    The model is one that `check_model` let pass.
    """
    every, coupled = specs, coupling_faults(edges, layouts)
    specs, edges = executed(specs, edges)
    trunk = trunk_of(specs)
    found = coupled + _head_faults(trunk, judge_of(specs, edges), layouts)
    if (tokens := tokens_after(trunk, edges)) > seq_len:
        found.append(f"model.edges: {tokens} tokens leave {trunk}, and training.seq_len is {seq_len}")
    for name, layout in layouts.items():
        spec, key = every[name], f"strategy.{name}"
        found += [f"{key}.tp is {layout.tp}; {fault}" for fault in _shard_faults(spec, layout.tp)]
        if layout.pp > 1 and spec["arch"] == "mlp":
            found.append(f"{key}.pp is {layout.pp}; dslaunch.runtime does not cut an mlp into stages")
        if layout.pp > 1 and spec.get("tied_embeddings"):
            found.append(
                f"{key}.pp is {layout.pp}; dslaunch.runtime keeps tied embeddings in one stage: pp 1, or "
                f"model.components.{name}.tied_embeddings=false"
            )
        if layout.vpp > 1 and spec["arch"] != "decoder" and name in specs:
            found.append(f"{key}.vpp is {layout.vpp}; dslaunch.runtime interleaves the stages of a decoder alone")
        if uneven := [count for count in layout.layers_per_stage if count % layout.vpp]:
            found.append(f"{key}.vpp is {layout.vpp}; {uneven[0]} layers of a stage are not divisible by it")
        if layout.zero == 3 and spec["train"] == "nothing":
            found.append(f"{key}.zero is 3; dslaunch.runtime keeps a frozen component whole: 0, 1 or 2")
        if layout.zero == 0 and precision != "fp32" and spec["train"] != "nothing":
            found.append(f"{key}.zero is 0; in {precision} dslaunch.runtime takes 1 or 2")
    return found


def macro_faults(
    specs: dict[str, Spec], edges: list[dict[str, Any]], layouts: Mapping[str, Cut], macro_batches: int
) -> list[str]:
    """Why a step cannot be cut into that many parts: a sentence each.

    Args:
        layouts: of all components, or of those that a search has looked at so far.
    """
    if macro_batches == 1:
        return []
    specs, edges = executed(specs, edges)
    key, trunk, judge = f"training.macro_batches is {macro_batches}", trunk_of(specs), judge_of(specs, edges)
    front = [name for name in specs if name not in (trunk, judge)]
    if not front:
        return [f"{key}; no component stands before {trunk}, for which a step is cut: leave it out"]
    known = [name for name in (trunk, *front) if name in layouts]
    if len(known) == 1 + len(front) and stands_apart(layouts, trunk, front):
        return [
            f"{key}; {listed(front)} stand on ranks of their own, ahead of {trunk} by what fills its pipeline: "
            "leave it out"
        ]
    found = _undivided(key, {name: layouts[name].num_microbatches for name in known}, macro_batches)
    if not found and trunk in layouts and layouts[trunk].vpp > 1:
        pp, passes = layouts[trunk].pp, layouts[trunk].num_microbatches // macro_batches
        if passes % pp:
            found.append(f"{key}; interleaved, each has {passes} micro-batches of {trunk}, no multiple of pp {pp}")
    return found


def stands_apart(layouts: Mapping[str, Cut], trunk: str, front: list[str]) -> bool:
    """Whether there are components before the trunk, and none has a rank of its."""

    def ranks(name: str) -> range:
        return range(layouts[name].rank_offset, layouts[name].rank_offset + layouts[name].ranks)

    own = ranks(trunk)
    return bool(front) and all(ranks(name).stop <= own.start or own.stop <= ranks(name).start for name in front)


def _head_faults(trunk: str, judge: str, layouts: Mapping[str, Cut]) -> list[str]:
    """A head takes what each micro-batch of the trunk gives before the trunk goes on."""
    if judge == trunk:
        return []
    found = []
    key, head, before = f"strategy.{judge}", layouts[judge], layouts[trunk]
    if head.pp > 1:
        found.append(f"{key}.pp is {head.pp}; dslaunch.runtime does not cut a head behind the decoder into stages")
    if head.num_microbatches % before.num_microbatches:
        found.append(
            f"{key}: num_microbatches {head.num_microbatches} is not a multiple of {trunk}'s "
            f"{before.num_microbatches}; set {key}.micro_batch"
        )
    return found


def _shard_faults(spec: Spec, tp: int) -> list[str]:
    """Sizes that `tp` shards do not divide."""
    if spec["arch"] == "mlp":
        cut = {f"dims[{number}]": spec["dims"][number] for number in range(1, len(spec["dims"]) - 1, 2)}
    else:
        cut = {key: spec[key] for key in ("heads", "ffn", "vocab") if key in spec}
    found = [f"{key} {size} is not divisible by it" for key, size in cut.items() if size % tp]
    heads = spec.get("kv_heads") or tp
    if heads % tp and tp % heads:
        found.append(f"kv_heads {heads} is neither divisible by it nor a divisor of it")
    return found


def trunk_of(specs: Mapping[str, Spec]) -> str:
    """The decoder that everything leads to; ConfigError where there is not one."""
    decoders = [name for name, spec in specs.items() if spec["arch"] == "decoder"]
    if len(decoders) != 1:
        raise ConfigError(
            f"model.components: found {len(decoders)} decoders ({listed(decoders)}); dslaunch.runtime "
            f"executes one decoder, with towers and projectors before it. {_SCRIPT}"
        )
    return decoders[0]


def judge_of(specs: Mapping[str, Spec], edges: list[dict[str, Any]]) -> str:
    """The component that makes the loss: the decoder, or a head that reads it.

    Raises:
        ConfigError: several components read the decoder.
    """
    trunk = trunk_of(specs)
    heads = sorted({edge["to"] for edge in edges if edge["from"] == trunk})
    if len(heads) > 1:
        raise ConfigError(
            f"model.edges: {listed(heads)} read {trunk}; dslaunch.runtime executes one head behind it. {_SCRIPT}"
        )
    return heads[0] if heads else trunk


def is_own(name: str, specs: Mapping[str, Spec]) -> bool:
    """Whether component `name` has a module of its own (`module: package:factory`)."""
    return bool(specs[name].get("module"))


def tokens_after(name: str, edges: list[dict[str, Any]]) -> int:
    """Tokens per sample that component `name` passes on, as its edges say; 0 where none leaves it."""
    return max((int(edge["tokens"]) for edge in edges if edge["from"] == name), default=0)


def tokens_between(name: str, specs: Mapping[str, Spec], edges: list[dict[str, Any]], seq_len: int) -> int:
    """Tokens per sample between the pipeline stages of component `name`: a decoder's sequence, a tower's patches
    with what stands before them in each pass.
    """
    spec = specs[name]
    if spec["arch"] == "decoder":
        return seq_len
    if spec["arch"] != "vit":
        return tokens_after(name, edges)
    patches = (spec["image"] // spec["patch"]) ** 2
    return int(spec["passes"] * (patches + int(spec["class_token"]) + spec["registers"]))


def shape_between(
    name: str, specs: Mapping[str, Spec], edges: list[dict[str, Any]], seq_len: int
) -> tuple[int, int]:
    """(tokens, width) of a sample between the pipeline stages of component `name`.

    Its own stream and its guests', which differ in width, stand one after another as one wide token.
    """
    tokens = tokens_between(name, specs, edges, seq_len)
    streams = streams_of(name, specs, edges, tokens) if "hidden" in specs[name] else []
    if len(streams) > 1:
        return 1, sum(count * width for count, width in streams)
    return tokens, width_after(specs[name])


def width_after(spec: Spec) -> int:
    """Width of a token that a component passes on."""
    return int(spec["dims"][-1] if spec["arch"] == "mlp" else spec["hidden"])


def output_tokens(name: str, specs: dict[str, Spec], edges: list[dict[str, Any]]) -> int:
    """Tokens per sample that component `name` passes on."""
    spec = specs[name]
    if is_own(name, specs) or spec["arch"] == "decoder":
        return tokens_after(name, edges)
    if spec["arch"] == "vit":
        return int((spec["image"] // spec["patch"]) ** 2)
    incoming = [edge for edge in edges if edge["to"] == name]
    counts = [output_tokens(edge["from"], specs, edges) for edge in incoming]
    more = [count for edge, count in zip(incoming[1:], counts[1:], strict=True) if edge["join"] == "sequence"]
    return counts[0] + sum(more)


def _check_component(name: str, spec: Spec, *, guest: bool) -> None:
    arch, own = spec["arch"], guest or bool(spec.get("module"))
    if arch not in _EXECUTED and not own:
        raise ConfigError(
            f"model.components.{name}.arch: found '{arch}'; dslaunch.runtime executes {listed(_EXECUTED)}. Name a "
            f"factory of your own in model.components.{name}.module, or give a training script: script=PATH."
        )
    known, one_of = (set(spec) - set(_OWN), _OWN) if own else (_EXECUTED[arch] | _ELSEWHERE, _ONE_OF[arch])
    for key, value in spec.items():
        if key in known:
            continue
        allowed = one_of.get(key)
        if (allowed and value not in allowed) or (not allowed and value):
            raise ConfigError(
                f"model.components.{name}.{key}: found {value!r}; dslaunch.runtime executes "
                f"{listed(allowed) if allowed else 'no such setting'} in a {arch}. {_SCRIPT}"
            )


def _check_edge(edge: dict[str, Any], specs: dict[str, Spec], trunk: str, judge: str) -> None:
    joins = _JOINS[:1] if edge["to"] in (trunk, judge) else _JOINS
    if edge["join"] not in joins:
        raise ConfigError(
            f"{_shown(edge)} joins by '{edge['join']}'; there dslaunch.runtime executes {listed(joins)}. {_SCRIPT}"
        )
    if specs[edge["to"]]["arch"] == "vit":
        raise ConfigError(f"{_shown(edge)}: dslaunch.runtime gives images to towers. {_SCRIPT}")
    if edge["from"] == trunk and not is_own(judge, specs):
        raise ConfigError(
            f"{_shown(edge)}: what reads the decoder makes the loss, for which dslaunch.runtime has no module. "
            f"Name a factory in model.components.{judge}.module. {_SCRIPT}"
        )
    if judge != trunk and edge["to"] == judge and edge["from"] != trunk:
        raise ConfigError(f"{_shown(edge)}: dslaunch.runtime gives a head what the decoder gives alone. {_SCRIPT}")
    if edge["from_layer"] != -1 and specs[edge["from"]]["arch"] != "vit":
        raise ConfigError(
            f"{_shown(edge)} reads layer {edge['from_layer']}; dslaunch.runtime reads an inner layer of towers "
            "only. Set from_layer to -1."
        )
    if unknown := [key for key in edge if key not in _EDGE and edge[key]]:
        raise ConfigError(f"{_shown(edge)}: dslaunch.runtime does not execute {unknown[0]}. {_SCRIPT}")


def _shown(edge: dict[str, Any]) -> str:
    return f"model.edges: {edge['from']} -> {edge['to']}"


def _undivided(key: str, numbers: dict[str, int], macro_batches: int) -> list[str]:
    """Micro-batches of components that cannot be dealt out to the parts, in one sentence."""
    wrong = [name for name, number in numbers.items() if number % macro_batches]
    if not wrong:
        return []
    shown = ", ".join(
        f"the {numbers[name]} {'' if i else 'micro-batches '}of {name}" for i, name in enumerate(wrong)
    )
    most = math.gcd(*numbers.values())
    whole = [part for part in range(2, most + 1) if most % part == 0]
    allowed = f"training.macro_batches can be {listed(whole, 8)}" if whole else "no number divides them all"
    return [f"{key}; it does not divide {shown}: set strategy.{wrong[0]}.micro_batch; as they are, {allowed}"]
