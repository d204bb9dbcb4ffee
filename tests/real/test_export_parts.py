"""What is exported of parts of a larger model of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.cases import planned
from tests.real.parts import need

need("torch", "transformers")

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from dslaunch.planfile import Plan  # noqa: E402
from dslaunch.runtime import hf  # noqa: E402
from dslaunch.runtime.export import Exported, _component  # noqa: E402
from tests.real.test_hf_modules import decoder_build, qwen, qwen_builds  # noqa: E402

PARTS = {"tower": hf.qwen2_5_vl_tower, "merger": hf.qwen2_5_vl_merger, "llm": hf.qwen2_5_vl_decoder}


@pytest.fixture(scope="module")
def plan() -> Plan:
    plan, _, _ = planned("recipe=vla_tiny", "cluster=local", "training.precision=fp32")
    return replace(plan, model={**plan.model, "components": {key: {} for key in PARTS}})


def exported(plan: Plan, name: str, part: nn.Module, to: Path) -> Exported:
    part.dslaunch_own = True  # type: ignore[assignment]  # as every module that a factory made
    values = {f"parts.{name}.{key}": parameter.detach() for key, parameter in part.named_parameters()}
    return _component(plan, name, part, values.__getitem__, to)


def test_the_parts_of_qwen2_5_vl_are_read_together(plan: Plan, tmp_path: Path) -> None:
    """The tower's class has the merger too: a config.json beside the tower alone would let it start at random."""
    together: dict[str, Tensor] = {}
    for name, build in qwen_builds().items():
        made = exported(plan, name, PARTS[name](build), tmp_path / name)
        assert bool(made.config) == (tmp_path / name / "config.json").exists() == (name == "llm")
        together |= load_file(tmp_path / name / "model.safetensors")
    whole = qwen()
    whole.config.save_pretrained(tmp_path / "whole")
    save_file(together, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    _, loading = type(whole).from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading


@pytest.mark.parametrize("names", [{}, {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}])
def test_a_decoder_has_a_configuration_where_it_has_its_own_names(
    names: dict[str, str], plan: Plan, tmp_path: Path
) -> None:
    build = decoder_build("llama")
    exported(plan, "llm", hf.decoder(replace(build, args={**build.args, "names": names})), tmp_path)
    assert (tmp_path / "config.json").exists() == (not names)
    if not names:
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
