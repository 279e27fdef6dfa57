"""The attention of known models as shapes with random numbers. No model is loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from app.engine.batch import StepBatch
from app.model.attention import AttentionRules, AttentionStep
from app.model.cuda.attention import TritonAttention
from app.model.inputs import build_inputs
from app.model.kv_cache import LayerShape
from benchmarks.gpu.bench import BLOCK_SIZE, Bench


class HeadShape(NamedTuple):
    """One kind of attention layer."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def layer(self) -> LayerShape:
        return LayerShape(num_kv_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim)

    def rules(self, device: torch.device) -> AttentionRules:
        return AttentionRules(
            scaling=self.head_dim**-0.5,
            sliding_window=self.window,
            softcap=self.softcap,
            sinks=torch.randn(self.num_heads, device=device) if self.has_sinks else None,
        )

    def tensors(self, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value of new tokens, [num_tokens, heads, head_dim] in bfloat16."""

        def made(num_heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, num_heads, self.head_dim, device=device).bfloat16()

        return made(self.num_heads), made(self.num_kv_heads), made(self.num_kv_heads)


ON_GPU = (
    HeadShape("Llama-3-8B, Qwen3-8B", 32, 8, 128),
    HeadShape("Gemma-2-9B, full", 16, 8, 256, softcap=50.0),
    HeadShape("Gemma-2-9B, window", 16, 8, 256, window=4096, softcap=50.0),
    HeadShape("gpt-oss-20B, full", 64, 8, 64, has_sinks=True),
    HeadShape("gpt-oss-20B, window", 64, 8, 64, window=128, has_sinks=True),
)
STANDING_IN = (
    HeadShape("tiny", 2, 1, 16),
    HeadShape("tiny, window", 2, 1, 16, window=5, softcap=5.0, has_sinks=True),
)


def attention_of(bench: Bench, shape: HeadShape, *, num_blocks: int, max_rows: int) -> TritonAttention:
    """Return the kernels over the KV memory of one such layer, filled with random numbers."""
    attention = TritonAttention(
        {0: shape.layer}, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_rows=max_rows, max_blocks=num_blocks,
        dtype=torch.bfloat16, device=bench.device,
    )  # fmt: skip
    for tensor in attention.cache.layer(0):
        tensor.normal_()
    return attention


def begun(attention: TritonAttention, batch: StepBatch) -> AttentionStep:
    """Begin a step over the layer."""
    return attention.begin_step(batch, build_inputs(batch, block_size=BLOCK_SIZE, device=attention.device))
