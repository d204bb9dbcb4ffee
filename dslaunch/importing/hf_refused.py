"""Architectures of transformers that a model file cannot describe, and what in them it cannot."""

from __future__ import annotations

_SIDE_BY_SIDE = "attention and MLP run side by side from one norm"
_STATE_SPACE = "layers with a state instead of attention"
_DELTA = "three of four layers are gated delta networks (linear attention), which no component has"
_TOWER = "the tower and what follows it are the model's own code, and transformers has no class to count against"
_GLM_TOWER = "after the tower a strided convolution, a norm and a gated MLP follow one another"
_GEMMA_3N = "each layer has a token table of its own, and its width alternates between updates (AltUp, LAuReL)"

UNDESCRIBED = {
    "bamba": _STATE_SPACE,
    "cohere": _SIDE_BY_SIDE,
    "cohere2": _SIDE_BY_SIDE,
    "deepseek_v32": "an indexer of its own chooses the keys that a query sees",
    "deepseek_vl_v2": _TOWER,
    "falcon_mamba": _STATE_SPACE,
    "gemma3n": _GEMMA_3N,
    "gemma3n_text": _GEMMA_3N,
    "glm4v": _GLM_TOWER,
    "glm4v_moe": _GLM_TOWER,
    "gpt_neox": "attention and MLP run side by side",
    "jamba": _STATE_SPACE,
    "kimi_linear": _DELTA,
    "kimi_vl": _TOWER,
    "lfm2": "layers with a short convolution instead of attention",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "minimax": "layers of linear attention",
    "mllama": "gated cross-attention layers stand among the decoder's, and its tower has two stages",
    "nemotron_h": _STATE_SPACE,
    "olmo2": "norms stand after the branches only, and those of queries and keys run over all heads together",
    "olmo3": "norms stand after the branches only, and those of queries and keys run over all heads together",
    "phi": _SIDE_BY_SIDE,
    "phi4_multimodal": "adapters for images and speech stand inside the language model, one set for each",
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_next": _DELTA,
    "qwen3_omni_moe": "a speaking and a hearing model stand beside the language model",
    "qwen2_5_omni": "a speaking and a hearing model stand beside the language model",
}
"""model_type -> what a model file has no word for."""
