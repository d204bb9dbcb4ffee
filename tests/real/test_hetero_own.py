"""The models of examples/own_models, of transformers' classes, under layouts of their own, against one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real.parts import need

need("torch", "deepspeed", "transformers", "sklearn")

import torch  # noqa: E402
import transformers  # noqa: E402

from dslaunch import planfile  # noqa: E402
from dslaunch.errors import ConfigError  # noqa: E402
from dslaunch.runtime.data import open_data  # noqa: E402
from dslaunch.runtime.graph import build_model, unset_model  # noqa: E402
from dslaunch.schema.model import Model  # noqa: E402
from tests.command import CommandLine  # noqa: E402
from tests.real import plans  # noqa: E402
from tests.real.hetero_ranks import (  # noqa: E402
    Case,
    Layout,
    execute,
    model_of,
    plan_of,
    training_of,
    whole,
    write,
)
from tests.real.hetero_reference import train_alone  # noqa: E402
from tests.real.ranks import run_ranks  # noqa: E402
from tests.real.test_hetero import compare, folder_of, parts_in  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_models"
LIMIT_S = 240.0
"""Eight processes on two cores, beside other things."""
PRELOAD = [
    "dslaunch.runtime.hf.qwen2_5_vl",
    "dslaunch.runtime.hf.towers",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama",
]


def model(name: str, kv_heads: int) -> dict[str, Any]:
    """Of the file, with other key and value heads, and larger epsilons: a norm blows up small start values."""
    raw = yaml.safe_load((EXAMPLES / "conf" / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    raw["components"]["llm"] |= {"kv_heads": kv_heads, "norm_eps": 0.1}
    if "action_expert" in raw["components"]:
        raw["components"]["action_expert"]["kv_heads"] = kv_heads
    else:
        heads = {"num_key_value_heads": kv_heads, "rms_norm_eps": 0.1}
        raw["components"]["llm"]["module_args"]["config"] |= heads
    raw["components"]["vision_encoder"]["module_args"]["config"]["layer_norm_eps"] = 0.1
    return Model.model_validate(raw).model_dump(mode="json", by_alias=True)


def llava(vision: Layout, projector: Layout, llm: Layout, kv_heads: int = 6, **more: Any) -> Case:
    shown = {"data": "own_models.sums:images_of_one_size", "seq_len": 16, **more}
    return Case(vision, projector, llm, model=model("llava_actions", kv_heads), **shown)


def qwen(vision: Layout, projector: Layout, llm: Layout, kv_heads: int = 6, **more: Any) -> Case:
    shown = {"data": "own_models.sums:images_of_any_size", "seq_len": 24, **more}
    return Case(vision, projector, llm, model=model("qwen2_5_vl_small", kv_heads), **shown)


def pi0(vision: Layout, projector: Layout, llm: Layout, kv_heads: int = 6, **more: Any) -> Case:
    shown = {"data": "own_models.flows:chunks", "seq_len": 16, **more}
    return Case(vision, projector, llm, model=model("pi0_small", kv_heads), **shown)


CASES = {
    "llava, twin of vla70b": llava(
        Layout(dp=4, tp=2, zero=2, recompute="selective", lr=1e-3),
        Layout(dp=8, zero=2),
        Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=6, recompute="selective"),
        clip=0.3,
    ),
    "llava, separate ranks, three replicas against two": llava(
        Layout(dp=3, zero=2, micro_batches=4),
        Layout(dp=3, zero=1, micro_batches=4),
        Layout(pp=2, dp=2, zero=1, offset=3, micro_batches=4, recompute="full"),
        masked=True,
    ),
    "llava, four stages, three shards": llava(
        Layout(pp=4, dp=2, zero=1, micro_batches=2, recompute="full"),
        Layout(dp=2, tp=3, zero=2),
        Layout(pp=2, dp=1, tp=3, zero=1, micro_batches=6),
        optimizer="SGD",
        clip=0.3,
    ),
    "llava, frozen tower, two heads over four shards": llava(
        Layout(pp=2, dp=4, micro_batches=3),
        Layout(dp=4, tp=2, zero=2),
        Layout(dp=2, tp=4, zero=2, micro_batches=4),
        kv_heads=2,
        frozen=("vision_encoder",),
    ),
    "qwen, twin of vla70b": qwen(
        Layout(dp=4, tp=2, zero=2, recompute="selective", lr=1e-3),
        Layout(dp=8, zero=2),
        Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=6, recompute="selective"),
        clip=0.3,
    ),
    "qwen, separate ranks, lockstep": qwen(
        Layout(pp=2, dp=2, zero=1, micro_batches=4),
        Layout(dp=3, zero=1, micro_batches=4),
        Layout(pp=2, dp=2, zero=1, offset=4, micro_batches=4, recompute="full"),
        masked=True,
    ),
    "qwen, four stages, three shards": qwen(
        Layout(dp=1, tp=3, zero=1, offset=4, micro_batches=4),
        Layout(dp=2, tp=4, zero=1, micro_batches=2),
        Layout(pp=4, dp=2, zero=1, micro_batches=6, recompute="full"),
        optimizer="SGD",
        clip=0.3,
    ),
    "qwen, tower on four stages, two heads over four shards": qwen(
        Layout(pp=4, dp=1, tp=2, zero=1, micro_batches=4, recompute="full"),
        Layout(dp=4, tp=2, zero=2),
        Layout(dp=2, tp=4, zero=2, micro_batches=4),
        kv_heads=2,
    ),
    "pi0, twin of vla70b": pi0(
        Layout(dp=4, tp=2, zero=2, recompute="selective", lr=1e-3),
        Layout(dp=8, zero=2),
        Layout(pp=2, dp=2, tp=2, zero=1, micro_batches=6, recompute="selective"),
        clip=0.3,
    ),
    "pi0, separate ranks, lockstep": pi0(
        Layout(pp=2, dp=2, zero=1, micro_batches=4),
        Layout(dp=3, zero=1, micro_batches=4),
        Layout(pp=2, dp=2, zero=1, offset=4, micro_batches=4, recompute="full"),
        masked=True,
    ),
    "pi0, interleaved, frozen tower": pi0(
        Layout(dp=2, tp=3, zero=2, micro_batches=4),
        Layout(dp=2, tp=4, zero=1, micro_batches=2),
        Layout(pp=2, vpp=2, dp=2, zero=1, micro_batches=4),
        schedule="interleaved",
        frozen=("vision_encoder",),
        clip=0.3,
    ),
    "pi0, two heads over four shards": pi0(
        Layout(pp=4, dp=1, tp=2, zero=1, micro_batches=4, recompute="full"),
        Layout(dp=4, tp=2, zero=2),
        Layout(dp=2, tp=4, zero=2, micro_batches=4),
        kv_heads=2,
        optimizer="SGD",
        clip=0.3,
    ),
}


BF16 = {f"{name}, in bf16": replace(CASES[name], precision="bf16") for name in CASES if "twin" in name}
FAST = ("qwen, twin of vla70b", "pi0, twin of vla70b", "qwen, twin of vla70b, in bf16")
"""LLaVA's twin runs with the fast ones as well: from weights, below."""
SLOW = (CASES | BF16).keys() - set(FAST)


def fast_first(names: Iterable[str]) -> list[Any]:
    """As parameters; those of SLOW for `make test-full` only."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, which is executed with all that are as slow when one of them is first asked for."""

    @cache
    def together(slow: bool) -> Path:
        root = tmp_path_factory.mktemp("own")
        cases = {name: case for name, case in (CASES | BF16).items() if (name in SLOW) == slow}
        for name, case in cases.items():
            write(case, root / folder_of(name))
        execute([root / folder_of(name) for name in cases], root / "logs", PRELOAD)
        return root

    return lambda name: together(name in SLOW) / folder_of(name)


@pytest.fixture(autouse=True, scope="module")
def examples_on_the_path() -> Any:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(EXAMPLES))
    patch.setenv("PYTHONPATH", str(EXAMPLES))
    yield
    patch.undo()


@pytest.mark.parametrize("name", fast_first(CASES))
def test_against_one_process(name: str, executed: Callable[[str], Path]) -> None:
    compare(CASES[name], executed(name))


@pytest.mark.parametrize("name", fast_first(BF16))
def test_bf16_follows_fp32(name: str, executed: Callable[[str], Path]) -> None:
    rows = parts_in(executed(name))[0]["rows"]
    exact = [row[0] for row in parts_in(executed(name.removesuffix(", in bf16")))[0]["rows"]]
    assert [row[0] for row in rows] == pytest.approx(exact, rel=2e-2)
    assert [row[0] for row in rows] != pytest.approx(exact, rel=1e-6), "it ran in fp32"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA's weights as transformers saves them, in several files."""
    torch.manual_seed(0)
    specs = model("llava_actions", 6)["components"]
    text, vision = (specs[name]["module_args"]["config"] for name in ("llm", "vision_encoder"))
    whole = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    )
    folder = tmp_path_factory.mktemp("llava")
    whole.save_pretrained(folder, max_shard_size="100KB")
    return folder


def from_pretrained(folder: Path) -> Case:
    """The twin, its tower and its decoder from weights; the action head is new."""
    case = CASES["llava, twin of vla70b"]
    assert case.model
    specs = copy.deepcopy(case.model["components"])
    for name, names in {
        "vision_encoder": {"model.": "vision_tower."},
        "llm": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    }.items():
        specs[name] |= {"weights": str(folder)}
        specs[name]["module_args"]["names"] = names
    return replace(case, model={**case.model, "components": specs}, steps=2)


def test_weights_of_a_whole_model_go_to_each_components_ranks(pretrained: Path, tmp_path: Path) -> None:
    case = from_pretrained(pretrained)
    write(case, tmp_path / "case")
    execute([tmp_path / "case"], tmp_path / "logs", PRELOAD)
    compare(case, tmp_path / "case")
    held = whole([part["parameters"] for part in parts_in(tmp_path / "case")])
    random = train_alone(replace(CASES["llava, twin of vla70b"], steps=0), torch.float32).parameters
    name = "parts.llm.model.layers.3.mlp.up_proj.weight"
    assert float((held[name] - random[name]).abs().max()) > 0.05, "it started from random weights"


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2"))]
)
@pytest.mark.parametrize(
    "name",
    [
        "qwen, twin of vla70b",
        *(pytest.param(f"{name}, twin of vla70b", marks=pytest.mark.slow) for name in ("llava", "pi0")),
    ],
)
def test_one_strategy_for_the_whole_model(strategy: str, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    training = replace(training_of(case), clip=0.0, optimizer="adamw", eps=1e-4, lr=2e-3)
    plan = plans.plan_for(strategy, 2, training, model_of(case), planfile.FilesPlan(data_path=case.data))
    for component in plan.components:
        plan = plans.with_component(plan, component, lr=2e-3)
    outcome = run_ranks(plans.write(plan, tmp_path), 2)
    assert outcome.statuses == [0, 0], outcome.output
    rows = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    same_rate = {part: replace(at, lr=2e-3) for part, at in case.layouts.items()}
    exact = train_alone(replace(case, clip=0.0, **same_rate), torch.float64)
    assert [row["loss"] for row in rows] == pytest.approx(exact.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(exact.norms, rel=1e-4)


def test_the_expert_reads_the_llm_and_is_not_read_by_it() -> None:
    """Other noise changes the flow's loss and not the answer's; the flow's gradient reaches the last keys."""
    plan = planfile.plan_from_json(planfile.to_json(plan_of(CASES["pi0, twin of vla70b"])), "plan.json")
    graph, batch = build_model(plan), open_data(plan).at(range(4))
    other = replace(batch, more={**batch.more, "noise": batch.more["noise"] + 1.0})
    flows = [graph(replace(each, labels=torch.full_like(each.labels, -100))) for each in (batch, other)]
    answers = [graph(each) - flow for each, flow in zip((batch, other), flows, strict=True)]
    assert float(flows[0].detach()) != pytest.approx(float(flows[1].detach()), rel=1e-2)
    assert float(answers[0].detach()) == pytest.approx(float(answers[1].detach()), rel=1e-5)
    flows[0].backward()
    last = graph.parts["llm"].get_parameter("layers.3.llm.attention.key.weight").grad
    assert last is not None
    assert float(last.abs().max()) > 0


def test_the_parameters_of_both_are_held_to_what_the_plan_counted_of_both() -> None:
    plan = plan_of(CASES["pi0, twin of vla70b"])
    counted = {"llm": 90_288, "action_expert": 38_232}
    for name, params in counted.items():
        plan = plans.with_component(plan, name, params=params)
    with torch.device("meta"):
        unset_model(plan)
        with pytest.raises(ConfigError, match=r"128,738 .* with 90,289, by the settings of llm, action_expert"):
            unset_model(plans.with_component(plan, "action_expert", params=1))


@pytest.mark.parametrize(
    "recipe",
    [
        "llava_actions",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl_small", "pi0_small")),
    ],
)
def test_the_examples_train_as_rendered(recipe: str, dslaunch: CommandLine, tmp_path: Path) -> None:
    """Eight ranks, a layout for each component; saved after two steps, and gone on with exactly."""
    words = (
        "render", "--config-dir", str(EXAMPLES), f"recipe={recipe}", "cluster=local", "training.steps=4",
        "training.optimizer.warmup_steps=1",
    )  # fmt: skip
    first = dslaunch(*words, "checkpoint.every=2", "-o", str(tmp_path / "first"))
    assert first.status == 0, first.err
    outcome = run_ranks(tmp_path / "first" / "plan.json", 8, LIMIT_S)
    assert outcome.statuses == [0] * 8, outcome.output
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    dslaunch(*words, f"checkpoint.load={saved}", "-o", str(tmp_path / "second"))
    outcome = run_ranks(tmp_path / "second" / "plan.json", 8, LIMIT_S)
    assert outcome.statuses == [0] * 8, outcome.output
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / each / "metrics.jsonl").read_text().splitlines()]
        for each in ("first", "second")
    ]
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == losses[0][2:]
