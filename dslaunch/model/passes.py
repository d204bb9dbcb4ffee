"""One pass over a component's layers on one rank, as the bytes that it keeps depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.hardware.software import PLAIN, Software
from dslaunch.model.tokens import ALONE, Reads


@dataclass(frozen=True)
class Pass:
    """What the bytes of one pass depend on besides the component."""

    tokens: int
    tp: int = 1
    sequence_parallel: bool = False
    """What is outside the cut matrices is shared out over tp by token."""
    recompute: str = "none"
    """`none`; `selective`: attention's core runs again from q, k and v, which stay, as does its output, the
    input of the output projection: with flash attention only the softmax statistics go (megatron-core 0.16.1,
    megatron/core/transformer/attention.py, checkpoints the core alone; its transformer_config.py warns that a
    fused core has no need of it); `full`: the layer's input stays, and `working_set_bytes` come back in the
    backward pass."""
    width: int = 2
    """Bytes of an element: 2 for bf16 and fp16, 4 for fp32."""
    reads: Reads = ALONE
    """Tokens of other components that attention reads."""
    ep: int = 1
    etp: int = 1
    """Tensor parallel ranks that share an expert."""
    together: int = 1
    """Samples of a micro-batch, which run together."""
    cp: int = 1
    software: Software = PLAIN
    """Whose layers run, and their habits."""

    @property
    def whole(self) -> float:
        """Share of an uncut tensor that a rank keeps."""
        return 1 / self.tp if self.sequence_parallel else 1.0
