"""`dslaunch convert` and `dslaunch export` of real checkpoints; what is exported, transformers loads and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.real import plans
from tests.real.parts import need
from tests.real.ranks import run_ranks
from tests.real.test_training import digits

need("torch", "deepspeed", "sklearn", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from dslaunch.runtime.checks import read_plan  # noqa: E402
from dslaunch.runtime.graph import build_model  # noqa: E402
from dslaunch.runtime.layers import rotation  # noqa: E402
from dslaunch.runtime.store import Source  # noqa: E402

LLAMA: dict[str, Any] = {**plans.LLM, "rope_theta": 500.0, "norm_eps": 1e-3}
QWEN: dict[str, Any] = {**LLAMA, "qkv_bias": True, "tied_embeddings": True}
SIGLIP: dict[str, Any] = {**plans.VISION, "patch_bias": True, "post_norm": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**plans.MODEL, "components": {**plans.MODEL["components"], "vision_encoder": SIGLIP, "llm": LLAMA}},
    "qwen2": {
        **plans.MODEL,
        "components": {
            **plans.MODEL["components"], "vision_encoder": {**SIGLIP, "train": "nothing"}, "llm": QWEN,
        },
    },
}  # fmt: skip


def dslaunch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dslaunch", *words], capture_output=True, text=True, timeout=240)


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The forms of `--json`, as its schema says them."""
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    jsonschema.validate(found, json.loads(dslaunch("schema", "dslaunch.forms/1").stdout))
    forms: list[dict[str, Any]] = found["forms"]
    return forms


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(the plan, its run) of two steps under ZeRO-3, whose pieces are the smallest."""
    plan = plans.plan_for("zero3", training=plans.training_plan(2), model=MODELS[request.param], files=digits())
    plan = replace(plan, launcher=replace(plan.launcher, python=sys.executable))
    folder = tmp_path_factory.mktemp("export") / "a user's run"
    outcome = run_ranks(plans.write(plan, folder), 2)
    assert outcome.statuses == [0, 0], outcome.output
    return read_plan(folder / "plan.json"), folder


def whole_model(plan: Any, run: Path) -> Any:
    """The model as dslaunch has it after the last step."""
    model = build_model(plan)
    source = Source(run / "checkpoints" / "step-00000002")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in source.tensors:
                parameter.copy_(source.whole(name, "weight"))
    return model


def test_transformers_computes_the_same_from_what_is_exported(trained: tuple[Any, Path], tmp_path: Path) -> None:
    plan, run = trained
    done = dslaunch("export", str(run), "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "projector, 4 tensors, no class of transformers" in done.stdout
    model = whole_model(plan, run)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "llm")
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    llm = model.parts["llm"]
    with torch.no_grad():
        x = llm.embedding(tokens)
        by = rotation(9, llm.head_dim, llm.rope_theta, x)
        for block in llm.blocks.values():
            x = block(x, by)
        torch.testing.assert_close(there(tokens).logits, llm.head(llm.norm(x)), rtol=1e-5, atol=1e-5)
        tower = transformers.SiglipVisionModel.from_pretrained(tmp_path / "out" / "vision_encoder")
        images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2))
        expected = model.parts["vision_encoder"](images)
        torch.testing.assert_close(tower(images).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_missing_or_left_over(trained: tuple[Any, Path], tmp_path: Path) -> None:
    _, run = trained
    forms = told(dslaunch("export", str(run), "-o", str(tmp_path), "--json"))
    readers = {form["component"]: form["architecture"] for form in forms}
    assert set(readers) == {"vision_encoder", "projector", "llm"}
    assert readers["llm"].endswith("ForCausalLM")
    for kind, folder in (
        (transformers.AutoModelForCausalLM, "llm"), (transformers.SiglipVisionModel, "vision_encoder"),
    ):  # fmt: skip
        _, loading = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading


def test_a_converted_checkpoint_holds_whole_tensors_that_any_layout_goes_on_from(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    plan, run = trained
    words = ["convert", str(run / "checkpoints" / "step-00000002"), "-o", str(tmp_path / "whole"), "--json"]
    form = told(dslaunch(*words))[0]
    tensors = load_file(tmp_path / "whole" / "tensors-00000.safetensors")
    parameters = dict(whole_model(plan, run).named_parameters())
    assert form["tensors"] == len({key.partition("/")[2] for key in tensors})
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        assert tensor.numel() == parameters[name].numel()
        if kind == "weight":
            assert torch.equal(tensor, parameters[name].detach().flatten()), name
    plan = replace(plan, training=replace(plan.training, steps=3))
    files = digits(checkpoint_load=str(tmp_path / "whole"))
    outcome = run_ranks(plans.write(replace(plan, files=files), tmp_path / "on"), 2)
    assert outcome.statuses == [0, 0], outcome.output
    assert "whole tensors, from ZeRO-3 on 2 ranks; it goes on as ZeRO-3 on 2 ranks" in outcome.output
    assert [json.loads(row)["step"] for row in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()] == [3]


def test_a_mistake_is_one_message(trained: tuple[Any, Path], tmp_path: Path) -> None:
    _, run = trained
    (tmp_path / "kept").write_text("")
    for words, message in (
        (["export", str(run), "-o", str(tmp_path)], "not empty. Name a new folder."),
        (["convert", str(tmp_path), "-o", f"{tmp_path}/out"], "no checkpoint of dslaunch.runtime stands there"),
        (["convert", "-o", "out"], "convert takes one run or checkpoint, found none"),
        (["export", "nowhere", "-o", "out"], "nowhere: no run: neither that folder nor runs/nowhere holds"),
    ):
        done = dslaunch(*words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
