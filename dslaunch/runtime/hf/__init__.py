"""Models of Hugging Face's transformers as components, as they are: each rank makes, cuts and loads its own part.

    components:
      llm:
        arch: decoder
        module: dslaunch.runtime.hf:decoder
        module_args: {config: {model_type: llama, hidden_size: 4096, ...}, image_token: 32000}
        weights: /models/llama

`config` is a configuration of transformers, or a folder with config.json (`part: text_config` takes a part of it).
"""

from __future__ import annotations

from torch import nn

from dslaunch.errors import ConfigError
from dslaunch.runtime.own import Build


def decoder(build: Build) -> nn.Module:
    """Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3: `*ForCausalLM`."""
    _need_transformers(build)
    from dslaunch.runtime.hf.decoders import HfDecoder

    return HfDecoder(build)


def tower(build: Build) -> nn.Module:
    """CLIPVisionModel, SiglipVisionModel, ViTModel; the patches are what is passed on."""
    _need_transformers(build)
    from dslaunch.runtime.hf.towers import HfTower

    return HfTower(build)


def qwen2_5_vl_tower(build: Build) -> nn.Module:
    """The blocks of Qwen2.5-VL's tower, without its merger."""
    _need_transformers(build)
    from dslaunch.runtime.hf.qwen2_5_vl import Tower

    return Tower(build)


def qwen2_5_vl_merger(build: Build) -> nn.Module:
    """Its merger, as an mlp of the plan."""
    _need_transformers(build)
    from dslaunch.runtime.hf.qwen2_5_vl import Merger

    return Merger(build)


def qwen2_5_vl_decoder(build: Build) -> nn.Module:
    """Its decoder, with mRoPE."""
    _need_transformers(build)
    from dslaunch.runtime.hf.qwen2_5_vl import Decoder

    return Decoder(build)


def _need_transformers(build: Build) -> None:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.components.{build.name}.module: {error}. Install transformers 5 in the training environment."
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise ConfigError(
            f"model.components.{build.name}.module: found transformers {transformers.__version__}; the names of "
            "modules are those of version 5. Install transformers 5 in the training environment."
        )
