"""Models of transformers, built, cut into stages and loaded by the runtime, against transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.parts import need

need("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from dslaunch.errors import ConfigError  # noqa: E402
from dslaunch.runtime import hf  # noqa: E402
from dslaunch.runtime.data import Batch  # noqa: E402
from dslaunch.runtime.graph import initialise  # noqa: E402
from dslaunch.runtime.own import Build, Piece  # noqa: E402
from dslaunch.runtime.tensor_parallel import ALONE, Shard, slice_for  # noqa: E402
from dslaunch.runtime.weights import read_weights  # noqa: E402
from tests.real.live_bytes import LiveBytes  # noqa: E402

LAYERS, HIDDEN, VOCAB, TEXT = 4, 32, 64, 16
IMAGE_TOKEN = VOCAB - 1
DECODER = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"head_dim": 8, "sliding_window": 4}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
TOWER = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "image_size": 8, "patch_size": 4, "num_channels": 3,
}  # fmt: skip
PATCHES = 4
VISION = {
    "depth": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": HIDDEN,
    "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8, "in_channels": 3,
    "fullatt_block_indexes": [1, 3],
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
GRIDS = [[1, 4, 6], [1, 8, 4], [1, 2, 2]]
"""Of three images: 24, 32 and 4 patches."""


def decoder_build(
    kind: str, piece: Piece | None = None, recompute: str = "none", tied: bool = False, **changes: Any
) -> Build:
    config = {"model_type": kind, **DECODER, **DECODERS.get(kind, {}), **changes}
    spec = {
        "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB, "passes": 1,
        "tied_embeddings": tied,
    }  # fmt: skip
    return Build("llm", spec, {"config": config}, piece or Piece(range(LAYERS)), recompute, -1, 0, TEXT)


def tower_build(kind: str, piece: Piece | None = None, from_layer: int = -1, passes: int = 1) -> Build:
    spec = {
        "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "ffn": 48, "patch": 4, "image": 8, "passes": passes,
    }  # fmt: skip
    args = {"config": {"model_type": kind, **TOWER}}
    piece = piece or Piece(range(LAYERS))
    return Build("tower", spec, args, piece, "none", from_layer, passes * PATCHES, passes * (PATCHES + 1))


def in_stages(make: Any, whole: nn.Module) -> list[nn.Module]:
    """The module in two stages, with the weights of `whole`, which hold all of its parameters and no others."""
    stages = [make(Piece(range(3), True, False)), make(Piece(range(3, LAYERS), False, True))]
    weights = whole.state_dict()
    assert {name for stage in stages for name in stage.state_dict()} == set(weights)
    for stage in stages:
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    return stages


def worst(found: nn.Module, wanted: dict[str, Tensor | None]) -> float:
    """The largest difference of gradients, as a share of the largest gradient."""
    gradients = {name: p.grad for name, p in found.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in gradients.values())
    return max(float((g - wanted[name]).abs().max()) for name, g in gradients.items()) / largest


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders(kind: str, recompute: str) -> None:
    if (kind, recompute) == ("gemma2", "selective"):
        with pytest.raises(ConfigError, match=r"recompute: found 'selective'. Allowed: none or full for gemma2"):
            hf.decoder(decoder_build(kind, recompute=recompute))
        return
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **DECODER, **DECODERS[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = hf.decoder(decoder_build(kind, recompute=recompute)).train()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(3, VOCAB, (3, TEXT))
    labels = tokens.where(torch.rand(tokens.shape) > 0.3, -100)
    count, batch = (labels[:, 1:] != -100).sum(), Batch(torch.zeros(0), tokens, labels)
    loss = ours(None, batch) / count
    wanted = theirs(tokens, labels=labels).loss
    wanted.backward()
    loss.backward()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    assert worst(ours, gradients_of(theirs)) < 1e-6
    first, last = in_stages(lambda piece: hf.decoder(decoder_build(kind, piece, recompute)), theirs)
    assert float(last(first(None, batch), batch) / count) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("from_layer", [-1, -2])
@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model", "vit"])
def test_towers(kind: str, from_layer: int) -> None:
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **TOWER)).eval()
    ours = hf.tower(tower_build(kind, from_layer=from_layer))
    ours.load_state_dict({f"model.{name}": t for name, t in theirs.state_dict().items()}, strict=False)
    images = torch.randn(3, 3, 8, 8)
    batch = Batch(images, torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long))
    out = theirs(images, output_hidden_states=True)
    wanted = out.last_hidden_state if from_layer == -1 else out.hidden_states[-2]
    torch.testing.assert_close(ours(None, batch), wanted[:, -PATCHES:], rtol=1e-5, atol=1e-6)
    first, last = in_stages(lambda piece: hf.tower(tower_build(kind, piece, from_layer)), ours)
    torch.testing.assert_close(last(first(None, batch), batch), wanted[:, -PATCHES:], rtol=1e-5, atol=1e-6)
    ours(None, batch).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 0, 0], [3, 3, 3]])
def test_several_images_or_none(counts: list[int]) -> None:
    """Features stand in the places of each sample's own images, zeros elsewhere; each parameter has a gradient."""
    torch.manual_seed(0)
    make = hf.tower(tower_build("clip_vision_model", passes=3))
    initialise(make, seed=0)
    images = torch.randn(sum(counts), 3, 8, 8)
    tokens = torch.zeros(3, 5, dtype=torch.long)
    out = make(None, Batch(images, tokens, tokens, torch.tensor(counts)))
    alone = hf.tower(tower_build("clip_vision_model"))
    alone.load_state_dict(make.state_dict())
    one_each = torch.zeros(len(images), 5, dtype=torch.long)
    wanted = iter(alone(None, Batch(images, one_each, one_each)) if len(images) else [])
    for sample, count in enumerate(counts):
        places = out[sample].view(3, PATCHES, HIDDEN)
        for place in range(3):
            expected = next(wanted) if place < count else torch.zeros(PATCHES, HIDDEN)
            torch.testing.assert_close(places[place], expected, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in make.parameters())


def qwen() -> Any:
    """transformers' whole model."""
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**DECODER, "rope_parameters": MROPE}, vision_config=VISION, image_token_id=IMAGE_TOKEN,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config).train()


def qwen_builds(piece: Piece | None = None) -> dict[str, Build]:
    whole = Piece(range(LAYERS))
    vision = {"config": {"model_type": "qwen2_5_vl_vision", **VISION}}
    tower = {
        "layers": LAYERS, "hidden": HIDDEN, "heads": 4, "ffn": 48, "patch": 2, "temporal_patch": 2, "channels": 3,
        "passes": 1,
    }  # fmt: skip
    text = decoder_build("qwen2_5_vl_text", piece, rope_parameters=MROPE)
    args = {**text.args, "image_token": IMAGE_TOKEN}
    merger = {"dims": [4 * HIDDEN, 4 * HIDDEN, HIDDEN]}
    return {
        "tower": Build("tower", tower, vision, piece or whole, "none", -1, 64, 64),
        "merger": Build("merger", merger, vision, whole, "none", -1, 16, 0),
        "llm": Build("llm", text.spec, args, text.piece, "none", -1, 0, 24),
    }


def qwen_batch(counts: list[int]) -> Batch:
    """Images of different sizes in text: one after the other, in samples that have several, one or none."""
    images = iter(GRIDS)
    tokens, grids = torch.randint(3, IMAGE_TOKEN, (len(counts), 24)), []
    for sample, count in enumerate(counts):
        place = 2
        for _ in range(count):
            grids.append(next(images))
            wide = grids[-1][1] * grids[-1][2] // 4
            tokens[sample, place : place + wide] = IMAGE_TOKEN
            place += wide + 1
    labels = tokens.where(tokens != IMAGE_TOKEN, -100)
    patches = sum(rows * columns for _, rows, columns in grids)
    more = {"image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3)}
    return Batch(torch.randn(patches, 3 * 2 * 2 * 2), tokens, labels, torch.tensor(counts), more)


@pytest.mark.parametrize("counts", [[1, 0, 2], [0, 1, 1], [0, 0, 0]])
def test_qwen2_5_vl(counts: list[int]) -> None:
    theirs = qwen()
    builds = qwen_builds()
    tower, merger = hf.qwen2_5_vl_tower(builds["tower"]), hf.qwen2_5_vl_merger(builds["merger"])
    llm = hf.qwen2_5_vl_decoder(builds["llm"])
    parts = {"tower": tower, "merger": merger, "llm": llm}
    names = {"tower": {"model.": "model.visual."}, "merger": {"merger.": "model.visual.merger."},
             "llm": {"model.": "model.language_model.", "lm_head.": "lm_head."}}  # fmt: skip
    weights = theirs.state_dict()

    def there(part: str, name: str) -> str:
        start = next(key for key in names[part] if name.startswith(key))
        return names[part][start] + name[len(start) :]

    for part, module in parts.items():
        module.load_state_dict({name: weights[there(part, name)] for name in module.state_dict()})
    batch = qwen_batch(counts)
    count = (batch.labels[:, 1:] != -100).sum()
    loss = llm(merger(tower(None, batch), batch), batch) / count
    loss.backward()
    seen = {
        "pixel_values": batch.images, "image_grid_thw": batch.more["image_grid_thw"],
        "mm_token_type_ids": (batch.tokens == IMAGE_TOKEN).int(),
    } if sum(counts) else {}  # fmt: skip
    wanted = theirs(input_ids=batch.tokens, labels=batch.labels, **seen).loss
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    gradients = gradients_of(theirs)
    for part, module in parts.items():
        assert all(p.grad is not None for p in module.parameters()), part
        for name, parameter in module.named_parameters():
            expected = gradients[there(part, name)]
            expected = torch.zeros_like(parameter) if expected is None else expected
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=f"{part} {name}")
    split = [qwen_builds(Piece(range(3), True, False)), qwen_builds(Piece(range(3, LAYERS), False, True))]
    towers = in_stages(lambda piece: hf.qwen2_5_vl_tower(split[not piece.first]["tower"]), tower)
    decoders = in_stages(lambda piece: hf.qwen2_5_vl_decoder(split[not piece.first]["llm"]), llm)
    x = merger(towers[1](towers[0](None, batch), batch), batch)
    again = decoders[1](decoders[0](x, batch), batch) / count
    assert float(again) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "clip_vision_model", "siglip_vision_model", "vit"])
def test_weights_that_save_pretrained_wrote(kind: str, tmp_path: Path) -> None:
    """In one file and in several, whole and by stages: what transformers reads back is what each stage holds."""
    torch.manual_seed(0)
    if kind in DECODERS:
        config = transformers.AutoConfig.for_model(kind, **DECODER, **DECODERS[kind])
        theirs, make = transformers.AutoModelForCausalLM.from_config(config), hf.decoder
        make_build: Any = decoder_build
    else:
        config = transformers.AutoConfig.for_model(kind, **TOWER)
        theirs, make = transformers.AutoModel.from_config(config), hf.tower
        make_build = tower_build
    with torch.device("meta"):
        uncut = make(make_build(kind))
    for size in ("1GB", "20KB"):
        folder = tmp_path / size
        theirs.save_pretrained(folder, max_shard_size=size)
        assert ((folder / "model.safetensors.index.json").exists()) == (size == "20KB")
        for piece in (Piece(range(3), True, False), Piece(range(3, LAYERS), False)):
            stage = make(make_build(kind, piece))
            read_weights(folder, "llm", stage, uncut, ALONE)
            for name, tensor in stage.state_dict().items():
                inner = name if kind in DECODERS else name.removeprefix("model.")
                assert torch.equal(tensor, theirs.state_dict()[inner]), (size, name)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks 9 tensors, such as model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 5}, r"has 9 tensors that the module lacks, such as model.layers.4"),
        ({"intermediate_size": 64}, r"gate_proj.weight in .* has shape \[64, 32\]; the module's is \[48, 32\]"),
    ],
)
def test_weights_of_another_model_are_refused(saved: dict[str, int], message: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **{**DECODER, **saved})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    whole = hf.decoder(decoder_build("llama"))
    with pytest.raises(ConfigError, match=message):
        read_weights(tmp_path, "llm", whole, whole, ALONE)


def test_a_tower_without_its_head_is_read_back_whole(tmp_path: Path) -> None:
    """As `dslaunch export` writes it: transformers starts nothing from random values."""
    ours = hf.tower(tower_build("siglip_vision_model"))
    ours.load_state_dict({name: torch.ones_like(t) for name, t in ours.state_dict().items()})
    ours.config.save_pretrained(tmp_path)
    weights = {name.removeprefix("model."): p.detach() for name, p in ours.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, loading = transformers.SiglipVisionModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    whole = hf.decoder(decoder_build("llama"))
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        read_weights(tmp_path, "llm", whole, whole, ALONE)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a safetensors file that can be read"):
        read_weights(tmp_path, "llm", whole, whole, ALONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "llm.hidden: found 32, but module_args.config has hidden_size = 64"),
        (
            {"tie_word_embeddings": True, "kind": "gemma"},
            "llm.tied_embeddings: found False, but module_args.config has tie_word_embeddings = True",
        ),
        ({"attention_dropout": 0.1}, "module_args.config.attention_dropout: found 0.1. Allowed: 0"),
        ({"model_type": "gpt2"}, "module_args.config: found 'model_type gpt2'. Allowed: llama, mistral"),
    ],
)
def test_a_configuration_unlike_the_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf.decoder(decoder_build(**{"kind": "llama", **changes}) if "model_type" not in changes else _gpt2())


def _gpt2() -> Build:
    build = decoder_build("llama")
    return Build(build.name, build.spec, {"config": {"model_type": "gpt2"}}, build.piece, "none", -1, 0, TEXT)


def test_tied_embeddings_stay_in_one_stage() -> None:
    tied = decoder_build("llama", tied=True, tie_word_embeddings=True)
    module = hf.decoder(tied)
    assert isinstance(module, nn.Module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"strategy\.llm\.pp: more than one stage, but tied"):
        hf.decoder(decoder_build("llama", Piece(range(2), True, False), tied=True, tie_word_embeddings=True))


def test_rotary_frequencies_stay_in_fp32() -> None:
    module = hf.decoder(decoder_build("llama")).to(torch.bfloat16)
    assert module.lm_head.weight.dtype is torch.bfloat16
    wanted = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(module.model.rotary_emb.inv_freq, wanted, rtol=1e-6, atol=0)


class HostBytes(LiveBytes):
    """Memory of the host's own: neither mapped files nor the meta device."""

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu" and not _mapped(storage.data_ptr()):
            super()._note(storage)


def _mapped(address: int) -> bool:
    """Whether it lies in a file of weights, which the kernel reads as pages are touched, and may forget again."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
        if line.endswith(".safetensors") and first <= address < last:
            return True
    return False


@pytest.mark.parametrize("kind", ["llama", "clip_vision_model"])
def test_a_rank_holds_its_own_part_alone_while_it_loads(kind: str, tmp_path: Path) -> None:
    """Shard 1 of 4 in the second of two stages: at no time more than what it keeps, and 1 MiB."""
    large = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    config, spec = {"model_type": kind, **(DECODER if kind == "llama" else TOWER), **large}, {"passes": 1}
    config |= {"num_key_value_heads": 4} if kind == "llama" else {}
    spec |= {"layers": LAYERS, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": VOCAB}
    spec |= {"patch": 4, "image": 8, "tied_embeddings": False}
    auto = transformers.AutoModelForCausalLM if kind == "llama" else transformers.AutoModel
    theirs = auto.from_config(transformers.AutoConfig.for_model(**config))
    make = hf.decoder if kind == "llama" else hf.tower
    theirs.save_pretrained(tmp_path, max_shard_size="10MB")

    def built(piece: Piece) -> Any:
        return make(Build("part", spec, {"config": config}, piece, "none", -1, PATCHES, PATCHES + 1))

    with HostBytes() as live:
        with torch.device("meta"):
            uncut = built(Piece(range(LAYERS)))
        stage = built(Piece(range(2, LAYERS), False, True, Shard(1, 4)))
        read_weights(tmp_path, "part", stage, uncut, Shard(1, 4))
    kept = sum(p.numel() * p.element_size() for p in stage.parameters())
    whole = sum(p.numel() * p.element_size() for p in theirs.parameters())
    assert kept < whole / 7
    assert live.peak < kept + 2**20, (live.peak, kept, whole)
    inner = {name.removeprefix("model.") if make is hf.tower else name: p for name, p in stage.named_parameters()}
    for name, parameter in inner.items():
        assert torch.equal(parameter, slice_for(theirs.get_parameter(name), parameter, Shard(1, 4))), name
