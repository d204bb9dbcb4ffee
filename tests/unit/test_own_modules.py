"""Components with modules of the user's: what the plan holds of them, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.runtime.checks import check_executable, read_plan
from dslaunch.runtime.naming import imported
from dslaunch.runtime.supported import check_model, check_weights, shape_between
from dslaunch.schema.model import Model
from tests.command import CommandLine

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_models"
LLAVA = ("--config-dir", str(EXAMPLES), "recipe=llava_actions", "cluster=local")
PI0 = ("--config-dir", str(EXAMPLES), "recipe=pi0_small", "cluster=local", "engine=native")
EXPERT = "model.components.action_expert"


def model(**llm: object) -> dict[str, object]:
    decoder = {
        "arch": "decoder",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 128,
        "vocab": 64,
    }
    return {"name": "one", "components": {"llm": {**decoder, **llm}}}


def specs_of(**llm: object) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = Model.model_validate(model(**llm)).model_dump(mode="json")[
        "components"
    ]
    return found


def test_the_plan_names_modules_and_data(dslaunch: CommandLine, tmp_path: Path) -> None:
    assert dslaunch("render", *LLAVA, "-o", str(tmp_path)).status == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    parts = plan["model"]["components"]
    assert parts["llm"]["module"] == "own_models.llava:decoder"
    assert parts["vision_encoder"]["module_args"]["config"]["model_type"] == "clip_vision_model"
    assert "module" not in parts["projector"], "a component without one is written as it was before"
    assert plan["files"]["data_path"] == "own_models.sums:images_of_one_size"
    assert plan["engine"]["name"] == "native"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model.components.llm.module=my-package",),
            "Allowed: package.module:factory, such as dslaunch.runtime",
        ),
        (("model.components.projector.weights=/w",), "weights is given without module, which reads it"),
        (("model.components.llm.train=lora", "model.components.llm.lora.rank=8"), "train: found 'lora'"),
        (("engine=megatron",), "model.components.llm.module is built by dslaunch.runtime, not by megatron"),
        (
            ("model.weights=/w",),
            "reads weights into modules of their own (model.components.projector.module)",
        ),
    ],
)
def test_what_is_refused_when_planning(words: tuple[str, ...], message: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", *LLAVA, *words)
    assert ran.status in (2, 3)
    assert message in ran.err


def test_settings_that_the_runtime_lacks_are_the_factorys_to_judge() -> None:
    with pytest.raises(ConfigError, match="qk_norm"):
        check_model(specs_of(qk_norm=True), [])
    check_model(specs_of(qk_norm=True, module="mine.models:qwen"), [])
    check_weights(specs_of(module="mine.models:qwen"), "/weights", [])
    with pytest.raises(ConfigError, match=r"model.weights: found '/weights'"):
        check_weights(specs_of(), "/weights", [])


def test_settings_of_a_module_keep_a_model_hashable() -> None:
    models = [Model.model_validate(model(module="a.b:c", module_args={"x": [n]})) for n in (1, 2)]
    assert len({each.components["llm"] for each in models}) == 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_package.models:decoder", "put its folder on PYTHONPATH"),
        ("json:decode", "json has no function 'decode'; there are .*loads"),
    ],
)
def test_a_function_that_is_not_there_is_named(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"model.components.llm.module: .*{message}"):
        imported(target, "model.components.llm.module")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("strategy.action_expert.tp=1",),
            "strategy.action_expert is TP1 PP2 DP4 ZeRO-1 recompute selective on ranks 0-7, strategy.llm is TP2",
        ),
        (
            ("strategy.action_expert.dp=1", "strategy.llm.dp=1", "strategy.action_expert.rank_offset=4"),
            "DP1 ZeRO-1 recompute selective on ranks 4-7, strategy.llm is TP2 PP2 DP1 ZeRO-1 recompute selective "
            "on ranks 0-3: they share attention layer by layer",
        ),
        (
            ("strategy.action_expert.zero=0",),
            "strategy.action_expert has zero 0, strategy.llm has zero 1; they attend",
        ),
        (
            ("strategy.action_expert.recompute=full",),
            "strategy.action_expert has recompute full, strategy.llm has recompute selective",
        ),
        (
            (f"{EXPERT}.lr=1e-4",),
            f"{EXPERT}.lr is 0.0001, model.components.llm.lr is not given; their layers attend",
        ),
        ((f"{EXPERT}.train=nothing",), f"{EXPERT}.train is nothing, model.components.llm.train is all"),
        ((f"{EXPERT}.module=a.b:c",), f"{EXPERT}.module: found 'a.b:c'; the module of llm makes both"),
        (
            (f"{EXPERT}.tokens=null",),
            f"{EXPERT}: it attends in the layers of llm, and dslaunch.runtime needs to know",
        ),
        (
            ("model.components.llm.module=",),
            "Name a factory in model.components.llm.module, of a decoder, that makes",
        ),
        (
            (
                "model.edges=[{from: vision_encoder, to: projector, tokens: 8, join: sequence}, "
                "{from: projector, to: llm, tokens: 8, join: sequence}, "
                "{from: llm, to: action_expert, tokens: 16, join: shared_attention}, "
                "{from: projector, to: action_expert, tokens: 8, join: sequence}]",
            ),
            "model.edges: projector -> action_expert: action_expert attends in the layers of llm, whose",
        ),
    ],
)
def test_layers_that_attend_together_are_one_component(
    words: tuple[str, ...], message: str, dslaunch: CommandLine
) -> None:
    ran = dslaunch("plan", *PI0, *words)
    assert ran.status in (2, 3)
    assert message in ran.err


def test_a_guest_has_no_engine_and_its_stream_goes_with_its_hosts(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    assert dslaunch("render", *PI0, "-o", str(tmp_path)).status == 0
    configurations = {path.name for path in tmp_path.glob("ds_config.*")}
    assert configurations == {f"ds_config.{name}.json" for name in ("vision_encoder", "projector", "llm")}
    plan = json.loads((tmp_path / "plan.json").read_text())
    specs, edges = plan["model"]["components"], plan["model"]["edges"]
    assert shape_between("llm", specs, edges, 16) == (1, 16 * 48 + 6 * 24)
    assert shape_between("vision_encoder", specs, edges, 16) == (2 * 5, 48)


def test_a_plan_with_a_guest_elsewhere_is_refused_as_an_edited_one(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    assert dslaunch("render", *PI0, "-o", str(tmp_path)).status == 0
    path = tmp_path / "plan.json"
    plan = json.loads(path.read_text())
    check_executable(read_plan(path))
    plan["components"]["action_expert"] |= {"zero": 0, "pp": 1}
    path.write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=r"action_expert has pp 1, zero 0, .*llm has pp 2, zero 1"):
        check_executable(read_plan(path))


def test_a_guest_is_interleaved_as_its_host_is(dslaunch: CommandLine) -> None:
    words = ("training.schedule=interleaved", "strategy.llm.vpp=2")
    ran = dslaunch("plan", *PI0, *words)
    assert ran.status == 3
    assert "strategy.action_expert has vpp 1, strategy.llm has vpp 2" in ran.err
    assert dslaunch("plan", *PI0, *words, "strategy.action_expert.vpp=2").status == 0
