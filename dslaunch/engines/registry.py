"""The engines by name, in the order in which `engine=auto` prefers them."""

from __future__ import annotations

from dslaunch.engines import deepspeed, megatron, megatron_deepspeed, megatron_mimo, native, torch
from dslaunch.engines.base import Engine

ENGINES: dict[str, Engine] = {
    module.ENGINE.name: module.ENGINE
    for module in (deepspeed, torch, megatron, megatron_deepspeed, native, megatron_mimo)
}
