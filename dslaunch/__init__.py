"""Configuration generator and launcher for DeepSpeed and Megatron training."""

__version__ = "0.1.0"
