"""Model files from configurations of transformers: what they say, what they leave out, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dslaunch.errors import ConfigError
from dslaunch.importing.hf import KNOWN, import_hf
from dslaunch.importing.hf_refused import UNDESCRIBED
from tests.command import CommandLine

LLAMA = {
    "_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def config(folder: Path, **keys: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **keys}))
    return str(path)


def notes(folder: Path, **keys: Any) -> list[str]:
    return [str(note) for note in import_hf(config(folder, **keys)).notes]


def test_the_package_has_the_same_llama(tmp_path: Path) -> None:
    made = import_hf(config(tmp_path))
    own = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / "llama3_8b.yaml").read_text())
    (text,) = made.files.values()
    read = yaml.safe_load(text)["components"]["llm"]
    assert (made.name, made.notes) == ("meta_llama_3_8b", ())
    assert {**read, "norm_eps": 1e-5} == {**own["components"]["llm"], "norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: positions are scaled"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: training starts from plain weights"),
        ({"attention_dropout": 0.1}, "attention_dropout: no key of dslaunch stands for it"),
        ({"some_new_key": 3}, "some_new_key: no key of dslaunch stands for it"),
    ],
)
def test_what_is_left_out_is_told(tmp_path: Path, keys: dict[str, Any], note: str) -> None:
    (found,) = notes(tmp_path, **keys)
    assert found.startswith(note)
    (text,) = import_hf(config(tmp_path, **keys)).files.values()
    assert f"#   {note}" in text


@pytest.mark.parametrize("keys", [{"attention_dropout": 0.0}, {"rope_scaling": None}, {"pad_token_id": 3}])
def test_what_says_nothing_is_not(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert notes(tmp_path, **keys) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "retnet"}, "model_type is 'retnet': no rule is known for it. Known are clip, "),
        ({"model_type": "mamba2"}, "cannot describe: layers with a state instead of attention"),
        ({"model_type": "qwen3_next"}, "cannot describe: three of four layers are gated delta networks"),
        (
            {"model_type": "llava", "vision_config": {}, "text_config": {"model_type": "mllama"}},
            "text_config.model_type is 'mllama', which a model file cannot describe: gated cross-attention layers",
        ),
        ({"model_type": "falcon"}, "one norm for attention and MLP together"),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 2}, "experts in some layers only"),
        ({"model_type": "qwen3moe"}, "Did you mean 'qwen3_moe'?"),
        ({"hidden_size": "large"}, "hidden_size is 'large': a whole number"),
        ({"num_attention_heads": 33}, "components.llm.decoder: hidden 4096 / heads 33 is not whole"),
        ({"model_type": "llava"}, "vision_config is missing"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "decoder_sparse_step is 2 and mlp_only_layers []: experts in some layers only are not modelled",
        ),
        (
            {"model_type": "llava", "vision_config": {"model_type": "swin"}, "text_config": {}},
            "vision_config.model_type is 'swin'",
        ),
    ],
)
def test_refusals(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        import_hf(config(tmp_path, **keys))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[]", "no model_type"), ("{}", "no model_type"), ("", "not JSON")]
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        import_hf(str(tmp_path))


def test_every_kind_that_the_help_promises_is_known() -> None:
    promised = (
        "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3 gpt2 deepseek_v3 glm4_moe vit "
        "siglip clip dinov2 llava qwen2_5_vl internvl"
    )
    assert set(promised.split()) <= set(KNOWN)


def test_what_is_refused_by_name_is_not_known_as_well() -> None:
    assert not set(UNDESCRIBED) & set(KNOWN)


def test_deepstack_enters_the_first_layers(tmp_path: Path) -> None:
    tower = {"deepstack_visual_indexes": [5, 11], "hidden_size": 1024, "num_heads": 16}
    text = {**LLAMA, "model_type": "qwen3_vl_text"}
    made = import_hf(config(tmp_path, model_type="qwen3_vl", vision_config=tower, text_config=text))
    edges = yaml.safe_load(next(iter(made.files.values())))["edges"]
    assert [(e["from"], e["to"], e.get("from_layer"), e.get("to_layers")) for e in edges] == [
        ("vision_encoder", "projector", None, None),
        ("projector", "llm", None, None),
        ("vision_encoder", "deepstack_5", 5, None),
        ("deepstack_5", "llm", None, [0]),
        ("vision_encoder", "deepstack_11", 11, None),
        ("deepstack_11", "llm", None, [1]),
    ]


def test_a_model_is_written_and_planned(dslaunch: CommandLine, tmp_path: Path) -> None:
    source, site = config(tmp_path), tmp_path / "a site"
    ran = dslaunch("import", "hf", source, "-o", str(site), "--name", "own.8b")
    assert (ran.status, ran.out.splitlines()) == (0, [str(site / "conf/model/own.8b.yaml")])
    words = ["recipe=llama3_8b", "model=own.8b", f"--config-dir={site}", "--json"]
    assert dslaunch("plan", *words).json["components"]["llm"]["params"] == 8_030_261_248


def test_without_a_folder_the_text_is_printed(dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("import", "hf", config(tmp_path))
    assert yaml.safe_load(ran.out)["name"] == "meta_llama_3_8b"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_name_that_is_none(dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("import", "hf", config(tmp_path), "--name", "../x", "-o", str(tmp_path / "site"))
    assert (ran.status, ran.out) == (2, "")
    assert "--name ../x" in ran.err


def test_a_hub_id_without_a_network_is_answered_at_once(
    dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")

    def nowhere(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", nowhere)
    monkeypatch.setattr("dslaunch.importing.hf.getproxies", dict)
    ran = dslaunch("import", "hf", "nobody/has-no-such-model")
    assert ran.status == 2
    assert "has no address here, and no copy is kept. Give the path of config.json." in ran.err
    assert "Retrying" not in ran.err
