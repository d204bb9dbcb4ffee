"""The layout of each component: what the recipe and the user say, what follows from it, and what is wrong.

A number that the user gave is kept as it is or refused with the arithmetic; only what is absent is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dslaunch.engines.layout import Layout
from dslaunch.engines.torch import shard_size
from dslaunch.errors import PlanError, listed
from dslaunch.hardware.topology import describe, tensor_domain
from dslaunch.model import shapes
from dslaunch.model.params import trainable
from dslaunch.model.tokens import own_tokens
from dslaunch.plan.batch import batches, not_whole
from dslaunch.plan.grids import spread_faults
from dslaunch.schema.config import RunConfig
from dslaunch.schema.deepspeed import Nvme
from dslaunch.schema.model import Component, Decoder
from dslaunch.schema.strategy import ComponentStrategy


def pinned(config: RunConfig) -> dict[str, ComponentStrategy]:
    """Per component, what is said about it: the recipe's layout, then strategy.every, then strategy.COMPONENT.

    Raises:
        PlanError: the recipe has no layout for this number of GPUs.
    """
    layout = _recipe_layout(config) if config.strategy.name == "layouts" else {}
    return {
        name: _merged(layout.get(name), config.strategy.every, config.strategy.components.get(name))
        for name in config.model.components
    }


def resolve(
    config: RunConfig, wanted: Mapping[str, ComponentStrategy]
) -> tuple[dict[str, Layout], list[str]]:
    """Layouts by component, and every fault found in them, each a sentence with its arithmetic.

    A component with a fault that leaves its layout undefined is missing from the layouts.
    """
    faults: list[str] = []
    replicas: dict[str, int] = {}
    for name, strategy in wanted.items():
        dp, found = _data_parallel(config, name, strategy)
        faults += _shape_faults(config, name, strategy) + found
        if dp is not None:
            replicas[name] = dp
    sizes, found = batches(config, wanted, replicas)
    layouts = {name: layout_of(config, name, wanted[name], dp, sizes[name]) for name, dp in replicas.items()}
    for name, layout in layouts.items():
        found += _schedule_faults(config, name, layout)
    if not faults:
        found += spread_faults(config, layouts)
    found += sequence_faults(config, layouts) + _mesh_faults(config, layouts) + _unread_nvme(config, layouts)
    return layouts, faults + found


def _unread_nvme(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """Settings of NVMe where nothing goes there."""
    if config.strategy.nvme == Nvme() or any(layout.offload.startswith("nvme") for layout in layouts.values()):
        return []
    return [
        "strategy.nvme is set, but no component's offload is nvme or nvme_params, so nothing would read it; set "
        "strategy.every.offload=nvme, or leave strategy.nvme out"
    ]


def training_faults(config: RunConfig) -> list[str]:
    """A model of which nothing trains."""
    components = config.model.components
    if any(trainable(component) for component in components.values()):
        return []
    first = next(iter(components))
    return [
        f"model.components: nothing trains of {listed(components)}, so an optimizer would have no parameters; "
        f"let one train, such as model.components.{config.model.trunk if len(components) > 1 else first}.train=all"
    ]


def _mesh_faults(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """Components that share attention layer by layer run as one: on the same ranks, cut alike."""
    faults = []
    for edge in config.model.edges:
        if edge.join != "shared_attention" or not {edge.source, edge.to} <= set(layouts):
            continue
        ends = [layouts[edge.source], layouts[edge.to]]
        meshes = [replace(end, zero=0, offload="none", recompute="none") for end in ends]
        if meshes[0] != meshes[1]:
            faults.append(
                f"strategy.{edge.to} is {_placed(ends[1])}, strategy.{edge.source} is {_placed(ends[0])}: they "
                "share attention layer by layer and need the same tp, pp, cp, dp, ranks, stages and "
                "micro-batches; set both, or strategy.every"
            )
    return faults


def _placed(layout: Layout) -> str:
    return f"{layout.describe()} on ranks {layout.rank_offset}-{layout.rank_offset + layout.ranks - 1}"


def sequence_faults(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What the trunk's sequence has to hold, and what it is cut into."""
    model, seq_len = config.model, config.training.seq_len
    trunk = model.components[model.trunk]
    if not isinstance(trunk, Decoder):
        return _fixed_sequence(config)
    faults = []
    joined = sum(e.tokens for e in model.edges if e.to == model.trunk and e.join == "sequence")
    if joined >= seq_len:
        faults.append(
            f"training.seq_len is {seq_len}, but {joined} tokens of other components stand in the sequence: "
            f"{seq_len} - {joined} leaves no text; more than {joined} is needed"
        )
    if trunk.position == "learned" and seq_len > trunk.max_positions:
        faults.append(
            f"training.seq_len is {seq_len}, but {model.name} has learned positions for "
            f"{trunk.max_positions} tokens"
        )
    cp = layouts[model.trunk].cp if model.trunk in layouts else 1
    return faults + (cut_faults(config, cp) if cp > 1 else [])


def cut_faults(config: RunConfig, cp: int) -> list[str]:
    """DeepSpeed's Ulysses gives each rank one piece of the sequence, Megatron's context parallelism two."""
    seq_len, each = config.training.seq_len, 1 if config.engine.name == "deepspeed" else 2
    if seq_len % (each * cp) == 0:
        return []
    shown = f"cp {cp}" if each == 1 else f"2 x cp {cp} = {2 * cp}"
    return [
        f"training.seq_len is {seq_len}: context parallelism cuts it into {shown} parts, and "
        f"{not_whole(f'{seq_len} / {each * cp}', seq_len, each * cp)}"
    ]


def _fixed_sequence(config: RunConfig) -> list[str]:
    """A trunk without a vocabulary whose model file says how many tokens it has."""
    model, seq_len = config.model, config.training.seq_len
    tokens = own_tokens(model, model.trunk, seq_len)
    if tokens == seq_len:
        return []
    return [
        f"training.seq_len is {seq_len}, but {model.trunk}, the trunk of {model.name}, runs over {tokens} tokens "
        f"a pass; training.seq_len can be {tokens}"
    ]


def _recipe_layout(config: RunConfig) -> Mapping[str, ComponentStrategy]:
    world = config.cluster.world_size
    if world in config.layouts:
        return config.layouts[world]
    if not config.layouts:
        raise PlanError(
            f"recipe {config.recipe} pins no layouts, and strategy is `layouts`. Choose one, such as "
            "strategy=zero3, or strategy=auto to search."
        )
    raise PlanError(
        f"recipe {config.recipe} pins layouts for {listed(sorted(config.layouts))} GPUs; the cluster has {world} "
        f"({describe(config.cluster)}). Use one of these sizes, or strategy=auto to search a layout."
    )


def _merged(*parts: ComponentStrategy | None) -> ComponentStrategy:
    """The later part wins, field by field."""
    given = {k: v for part in parts if part for k, v in part.model_dump(exclude_none=True).items()}
    return ComponentStrategy(**given)


def layout_of(
    config: RunConfig, name: str, want: ComponentStrategy, dp: int, sizes: tuple[int, int]
) -> Layout:
    """The layout that is asked for, with `dp` replicas and `sizes`, (micro_batch, num_microbatches)."""
    pp = want.pp or 1
    layers = shapes.layers(config.model.components[name])
    return Layout(
        tp=want.tp or 1, pp=pp, vpp=want.vpp or 1, cp=want.cp or 1, ep=want.ep or 1, dp=dp,
        zero=want.zero or 0,
        offload=want.offload or "none",
        recompute=want.recompute or "none",
        micro_batch=sizes[0],
        num_microbatches=sizes[1],
        rank_offset=want.rank_offset or 0,
        layers_per_stage=want.layers_per_stage or tuple([layers // pp] * pp),
        expert_tp=None if want.etp in (None, want.tp or 1) else want.etp,
        shard_size=shard_size(config),
    )  # fmt: skip


def _shape_faults(config: RunConfig, name: str, want: ComponentStrategy) -> list[str]:
    component, cluster = config.model.components[name], config.cluster
    tp, pp, vpp, key = want.tp or 1, want.pp or 1, want.vpp or 1, f"strategy.{name}"
    faults = []
    domain = tensor_domain(cluster)
    if tp > domain:
        faults.append(
            f"{key}.tp is {tp}, but tensor parallelism stays among the {domain} GPUs that a fast link joins "
            f"({describe(cluster)}); tp can be at most {domain}"
        )
    elif domain % tp:
        faults.append(
            f"{key}.tp is {tp}: groups of {tp} do not fill the {domain} GPUs that a fast link "
            "joins; some would cross it"
        )
    if wrong := shapes.legal_tp(component, tp, most=domain, experts_apart=want.etp is not None):
        faults.append(f"{key}.tp is {tp}: {wrong}")
    if wrong := shapes.legal_ep(component, want.ep or 1):
        faults.append(f"{key}.ep is {want.ep}: {wrong}")
    faults += _expert_cut_faults(key, component, want.etp, domain)
    if wrong := shapes.legal_pp(component, pp, vpp, want.layers_per_stage):
        faults.append(f"{key}.pp is {pp}: {wrong}")
    return faults


def _expert_cut_faults(key: str, component: Component, etp: int | None, domain: int) -> list[str]:
    """An etp that does not cut the experts, or whose ranks exchange in every layer over the slow network."""
    if etp is None:
        return []
    if wrong := shapes.legal_etp(component, etp, domain):
        return [f"{key}.etp is {etp}: {wrong}"]
    if domain % etp:
        return [
            f"{key}.etp is {etp}: groups of {etp} do not fill the {domain} GPUs that a fast link joins; some "
            "would cross it"
        ]
    return []


def _data_parallel(config: RunConfig, name: str, want: ComponentStrategy) -> tuple[int | None, list[str]]:
    """(replicas, faults); None where the ranks of a replica do not fit into the world."""
    world, key, offset = config.cluster.world_size, f"strategy.{name}", want.rank_offset or 0
    tp, pp, cp = want.tp or 1, want.pp or 1, want.cp or 1
    per_replica = tp * pp * cp
    shown = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
    if want.dp is None:
        left = world - offset
        if per_replica > left:
            return None, [
                f"{key}: {shown} = {per_replica} ranks, but there are {left} GPUs ({describe(config.cluster)})"
            ]
        if left % per_replica:
            return None, [
                f"{key}: {shown} = {per_replica} ranks do not divide {left} GPUs; "
                f"{left} / {per_replica} = {left / per_replica:.4g} replicas"
            ]
        return left // per_replica, []
    need = per_replica * want.dp
    if offset + need > world:
        at = f" from rank {offset}" if offset else ""
        return want.dp, [
            f"{key}: {shown} x dp {want.dp} = {need} ranks{at}, but there are {world} GPUs "
            f"({describe(config.cluster)})"
        ]
    if want.rank_offset is None and need < world:
        hint = f"; {key}.dp={world // per_replica} uses all" if world % per_replica == 0 else ""
        return want.dp, [
            f"{key}: {shown} x dp {want.dp} = {need} ranks leave {world - need} of {world} GPUs without work{hint}"
        ]
    return want.dp, []


def _schedule_faults(config: RunConfig, name: str, layout: Layout) -> list[str]:
    schedule, key = config.training.order(layout.vpp), f"strategy.{name}"
    if layout.vpp > 1 and schedule != "interleaved":
        return [f"{key}.vpp is {layout.vpp}, but training.schedule is {schedule}; leave one of them out"]
    if name != config.model.trunk or schedule != "interleaved":
        return []
    if layout.vpp == 1:
        return [f"training.schedule is interleaved, which needs {key}.vpp of 2 or more"]
    if layout.num_microbatches % layout.pp:
        return [
            f"training.schedule is interleaved: num_microbatches {layout.num_microbatches} must be a multiple of "
            f"{key}.pp {layout.pp} (megatron/core/pipeline_parallel/schedules.py, core 0.16)"
        ]
    return []
