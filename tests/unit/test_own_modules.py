"""Components with modules of the user's: what the plan holds of them, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.runtime.naming import imported
from dslaunch.runtime.supported import check_model, check_weights
from dslaunch.schema.model import Model
from tests.command import CommandLine

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_models"
LLAVA = ("--config-dir", str(EXAMPLES), "recipe=llava_actions", "cluster=local")


def model(**llm: object) -> dict[str, object]:
    decoder = {"arch": "decoder", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 64}
    return {"name": "one", "components": {"llm": {**decoder, **llm}}}


def specs_of(**llm: object) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = Model.model_validate(model(**llm)).model_dump(mode="json")["components"]
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
        (("model.components.llm.module=my-package",), "Allowed: package.module:factory, such as dslaunch.runtime"),
        (("model.components.projector.weights=/w",), "weights is given without module, which reads it"),
        (("model.components.llm.train=lora", "model.components.llm.lora.rank=8"), "train: found 'lora'"),
        (("engine=megatron",), "model.components.llm.module is built by dslaunch.runtime, not by megatron"),
        (("model.weights=/w",), "reads weights into modules of their own (model.components.projector.module)"),
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
    check_weights(specs_of(module="mine.models:qwen"), "/weights")
    with pytest.raises(ConfigError, match=r"model.weights: found '/weights'"):
        check_weights(specs_of(), "/weights")


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
