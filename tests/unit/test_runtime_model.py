"""The modules that the runtime builds: their parameters, their joins, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from dslaunch.errors import ConfigError
from dslaunch.model.params import params
from dslaunch.paths import data_root
from dslaunch.schema.model import Component, Model
from tests.real import plans
from tests.real.parts import need

need("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from dslaunch.runtime.components import Decoder, ViT, blocks_up_to, build_component  # noqa: E402
from dslaunch.runtime.data import IGNORE, Batch  # noqa: E402
from dslaunch.runtime.engine_torch import TorchEngine  # noqa: E402
from dslaunch.runtime.graph import Graph, build_model, parameter_groups  # noqa: E402
from dslaunch.runtime.supported import check_model  # noqa: E402
from dslaunch.runtime.world import World  # noqa: E402

MODEL_FILES = sorted((data_root() / "conf" / "model").glob("*.yaml"))
BUILT = {"llama3_8b", "llama3_70b", "openvla_7b", "vla70b", "vla_tiny"}
VIT = {**plans.VISION, "channels": 3}
VARIANTS = [
    plans.LLM,
    {**plans.LLM, "tied_embeddings": True, "qkv_bias": True},
    {**plans.LLM, "norm": "layernorm", "position": "learned", "gated_mlp": False, "mlp_bias": True},
    {**plans.LLM, "out_bias": True},
    {**plans.LLM, "head_dim": 32, "kv_heads": 1},
    VIT,
    {**VIT, "class_token": True, "pre_norm": True, "post_norm": False, "patch_bias": False},
    {**VIT, "class_token": True, "registers": 4, "layer_scale": True, "gated_mlp": True},
    {**VIT, "attention_pooling": True},
    {"arch": "mlp", "dims": [32, 64, 64], "bias": False, "norm": True},
]


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def assert_counts(component: Component) -> None:
    with torch.device("meta"):
        module = build_component(component.model_dump(mode="json"), "none", -1)
    assert count(module) == params(component)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_a_model_is_built_as_it_is_counted_or_refused(path: Path) -> None:
    model = Model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    plain = model.model_dump(mode="json", by_alias=True)
    try:
        check_model(plain["components"], plain["edges"])
    except ConfigError:
        assert path.stem not in BUILT
        return
    for component in model.components.values():
        assert_counts(component)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_option_counts_alike(variant: dict[str, Any]) -> None:
    assert_counts(TypeAdapter(Component).validate_python(variant))


def built(strategy: str = "ddp", model: dict[str, Any] = plans.MODEL) -> Graph:
    return build_model(plans.plan_for(strategy, model=model))


def with_parts(edges: list[dict[str, Any]], **components: dict[str, Any]) -> dict[str, Any]:
    return {"name": "test", "components": {"llm": plans.LLM, **components}, "edges": edges}


def edge(source: str, to: str, join: str = "sequence", tokens: int = 16, from_layer: int = -1) -> dict[str, Any]:
    return {"from": source, "to": to, "tokens": tokens, "join": join, "from_layer": from_layer}


def loss_of(model: Graph, channels: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(2, channels, 8, 8, generator=draw)
    tokens = torch.randint(0, 64, (2, 12), generator=draw)
    loss: torch.Tensor = model(Batch(images, tokens, tokens))
    return loss


def test_every_rank_and_strategy_starts_from_the_same_weights() -> None:
    one, other = built("ddp").state_dict(), built("zero3").state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_decoder_sees_nothing_that_comes_later() -> None:
    decoder = build_component(plans.model_of(plans.MODEL)["components"]["llm"], "none", -1)
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 7:] = 50
    labels = torch.full_like(tokens, -100)
    labels[0, 7] = 3  # predicted from tokens 0 to 6
    assert decoder(None, tokens, labels) == decoder(None, changed, labels)
    changed[0, 6] = 50
    assert decoder(None, tokens, labels) != decoder(None, changed, labels)


@pytest.mark.parametrize("join", ["channel", "add", "sequence"])
def test_two_towers_join(join: str) -> None:
    """The image reaches the loss through both towers, and through both halves of a channel join."""
    width = 96 if join == "channel" else 48
    tokens = 32 if join == "sequence" else 16
    edges = [edge(tower, "projector", join) for tower in ("left", "right")]
    edges.append(edge("projector", "llm", tokens=tokens))
    projector = {"arch": "mlp", "dims": [width, plans.HIDDEN]}
    model = built(model=with_parts(edges, left=plans.VISION, right=plans.VISION, projector=projector))
    loss_of(model).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parts["left"].patch.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parts["right"].patch.parameters())


def test_blocks_behind_the_layer_that_is_read_do_not_train() -> None:
    edges = [edge("vision_encoder", "projector", from_layer=-2), edge("projector", "llm")]
    model = built(model={**plans.MODEL, "edges": edges})
    tower = model.parts["vision_encoder"]
    assert isinstance(tower, ViT)
    loss_of(model).backward()
    assert [any(p.requires_grad for p in block.parameters()) for block in tower.blocks.values()] == [True, False]
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("from_layer", "blocks"), [(-1, 4), (-2, 3), (0, 1), (3, 4)])
def test_layer_numbers(from_layer: int, blocks: int) -> None:
    assert blocks_up_to(from_layer, 4) == blocks


def test_each_component_that_trains_has_a_group_the_decoder_first() -> None:
    plan = plans.with_component(plans.plan_for("ddp"), "projector", lr=0.5, weight_decay=0.25)
    groups = parameter_groups(build_model(plan), plan)
    assert [group["lr"] for group in groups].count(0.5) == 1
    assert groups[0]["params"][0].shape == (64, plans.HIDDEN), "the embedding table"
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(3e-3, 0.1), (0.5, 0.25)}


def test_tied_embeddings_are_one_parameter() -> None:
    tied = {**plans.MODEL["components"], "llm": {**plans.LLM, "tied_embeddings": True}}
    model = built(model={**plans.MODEL, "components": tied})
    decoder = model.parts["llm"]
    assert isinstance(decoder, Decoder)
    assert decoder.head.weight is decoder.embedding.weight


MLP = {"arch": "mlp", "dims": [48, plans.HIDDEN]}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_parts([edge("llm", "other")], other=plans.LLM), "found 2 decoders"),
        (with_parts([edge("projector", "llm")], projector=MLP), "projector: no edge leads to it"),
        (
            with_parts([edge("vision", "projector"), edge("vision", "llm")], vision=plans.VISION, projector=MLP),
            "projector: no edge leaves",
        ),
        (with_parts([edge("llm", "head")], head=MLP), "Name a factory in model.components.head.module"),
        (with_parts([edge("llm", "head"), edge("llm", "b")], head=MLP, b=MLP), "executes one head behind it"),
        (with_parts([edge("vision", "llm", "add")], vision=plans.VISION), "joins by 'add'"),
        (with_parts([edge("vision", "llm", tokens=9)], vision=plans.VISION), "says 9 tokens, but vision gives 16"),
    ],
)
def test_a_graph_that_is_not_executed_is_refused(model: dict[str, Any], message: str) -> None:
    spec = plans.model_of(model)
    with pytest.raises(ValueError, match=message):
        check_model(spec["components"], spec["edges"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("passes", 3, "passes: found 3; dslaunch.runtime executes 1 in a vit"),
        ("train", "lora", "train: found 'lora'; dslaunch.runtime executes all, nothing in a vit"),
        ("arch", "resnet", "arch: found 'resnet'; dslaunch.runtime executes decoder, vit, mlp"),
        ("rotary", {"theta": 10}, "rotary: found {'theta': 10}; dslaunch.runtime executes no such setting"),
    ],
)
def test_a_setting_that_the_modules_do_not_know_is_refused(key: str, value: object, message: str) -> None:
    """Also one that this version has never heard of, as long as it is on."""
    spec = plans.model_of(plans.MODEL)
    spec["components"]["vision_encoder"] |= {"unheard_of": False, key: value}
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model(spec["components"], spec["edges"])


def test_a_model_that_does_not_train_is_refused() -> None:
    frozen = {name: {**spec, "train": "nothing"} for name, spec in plans.MODEL["components"].items()}
    with pytest.raises(ValueError, match="every component has `train: nothing`"):
        built(model={**plans.MODEL, "components": frozen})


class Labelled:
    """Sample n has n labels: none, one, two or three."""

    def at(self, numbers: Iterable[int]) -> Batch:
        wanted = torch.tensor(list(numbers))
        tokens = torch.arange(8).repeat(len(wanted), 1) + wanted[:, None]
        labels = tokens.where(torch.arange(8) <= wanted[:, None], IGNORE)
        return Batch(torch.linspace(-1, 1, 64).view(1, 1, 8, 8) * wanted.view(-1, 1, 1, 1), tokens, labels)


@pytest.fixture
def alone() -> Iterator[World]:
    """One process, which is a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def test_the_loss_is_the_mean_over_all_labels_of_a_step_however_it_is_cut(alone: World) -> None:
    """A sample without a label, in a micro-batch of its own, is no 0 / 0, and weighs nothing."""
    results = []
    for micro_batch in (4, 2, 1):
        plan = plans.plan_for("ddp", world_size=1, training=plans.training_plan(1, global_batch=4))
        for name in plan.components:
            plan = plans.with_component(plan, name, micro_batch=micro_batch, num_microbatches=4 // micro_batch)
        torch.manual_seed(0)
        result = TorchEngine(plan, alone, Labelled()).step(0)
        results.append((float(result.loss), result.grad_norm))
        assert result.images == 4
    assert results[1:] == [pytest.approx(results[0], rel=1e-5)] * 2
