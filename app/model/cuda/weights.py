"""Joins the weights of a Llama-like transformers model for the decoder for CUDA, where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from app.model.attention import AttentionRules
from app.model.cuda.fp8 import Fp8Rows, Rows, in_fp8
from app.model.llama import QUERIES_KEYS_VALUES, DecoderSettings, Weights, given, joined_bias

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedLayer:
    """One layer. Matrices are [outputs, inputs], as torch has them; each may be in FP8."""

    input_norm: torch.Tensor  # [hidden_size]
    query_key_value: Rows  # outputs: heads of queries, then of keys, then of values
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: Rows
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    # [num_experts, hidden_size], None where there are no experts; of a shared expert a row that says what is made of it
    router: torch.Tensor | None
    # [2 * intermediate_size, hidden_size]; of experts with their number before, a shared one in pieces of their size;
    # never in FP8 then
    gate_up: Rows
    down: Rows  # [hidden_size, intermediate_size]; the same
    rules: AttentionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedWeights:
    """A whole model, all in one type on one device."""

    settings: DecoderSettings
    layers: tuple[JoinedLayer, ...]
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    final_norm: torch.Tensor
    head: torch.Tensor  # [vocab_size, hidden_size]; the embedding itself where they are tied
    rotary: torch.Tensor  # [num_positions, head_dim]: cosines, then sines, of half a head each

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them; those that are tied more than once."""
        parts: tuple[JoinedWeights | JoinedLayer, ...] = (self, *self.layers)
        for part in parts:
            for value in (getattr(part, each.name) for each in fields(part)):
                yield from value if isinstance(value, Fp8Rows) else (value,) if isinstance(value, torch.Tensor) else ()


@torch.inference_mode()
def join_weights(
    module: PreTrainedModel, settings: DecoderSettings, *, num_positions: int, quantised: bool = False
) -> JoinedWeights:
    """Take the weights of a model, one layer after the other; the module has none afterwards.

    So the device holds those of no more than one layer twice.

    quantised: the matrices of the layers become FP8; embedding and head stay as they are.
    """
    base = module.model
    embedding, head = base.embed_tokens.weight.detach(), module.lm_head.weight.detach()
    final_norm = base.norm.weight.detach()
    layers = []
    for layer, window in zip(base.layers, settings.sliding_windows, strict=True):
        rules = AttentionRules(scaling=settings.scaling, sliding_window=window or None)
        layers.append(_join_layer(layer, rules, in_fp8 if quantised else lambda weight: weight))
        layer.to(device="meta")
    module.to(device="meta")
    positions = torch.arange(num_positions, device=embedding.device)
    cosines, sines = (table.chunk(2, dim=-1)[0] for table in settings.rotary(positions, embedding.dtype))
    return JoinedWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        rotary=torch.cat((cosines, sines), dim=-1),
    )


def _join_layer(layer: nn.Module, rules: AttentionRules, stored: Callable[[torch.Tensor], Rows]) -> JoinedLayer:
    """stored: a matrix as it is kept."""
    # Linear layers that join what ranks compute have another one inside.
    state: dict[str, Any] = {name.replace(".linear.", "."): weight for name, weight in layer.state_dict().items()}
    weights = state.get
    router = weights("mlp.gate.weight")
    if router is None:
        gate_up = torch.cat([given(weights, f"mlp.{name}_proj.weight") for name in ("gate", "up")])
        down = given(weights, "mlp.down_proj.weight")
    else:  # transformers has joined them
        gate_up, down = (given(weights, f"mlp.experts.{name}_proj") for name in ("gate_up", "down"))
        own_share = weights("mlp.shared_expert_gate.weight")
        if own_share is not None:
            pieces = _pieces_of_shared_expert(weights, down.shape[-1])
            router, gate_up, down = map(torch.cat, ((router, own_share), (gate_up, pieces[0]), (down, pieces[1])))
    return JoinedLayer(
        input_norm=given(weights, "input_layernorm.weight"),
        query_key_value=stored(torch.cat([given(weights, f"{name}.weight") for name in QUERIES_KEYS_VALUES])),
        query_key_value_bias=joined_bias(weights, QUERIES_KEYS_VALUES),
        query_norm=weights("self_attn.q_norm.weight"),
        key_norm=weights("self_attn.k_norm.weight"),
        output=stored(given(weights, "self_attn.o_proj.weight")),
        output_bias=weights("self_attn.o_proj.bias"),
        post_attention_norm=given(weights, "post_attention_layernorm.weight"),
        router=router,
        gate_up=gate_up if router is not None else stored(gate_up),
        down=down if router is not None else stored(down),
        rules=rules,
    )


def _pieces_of_shared_expert(weights: Weights, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its gate_up and down as experts of an inner size, which add up to it; the last is filled up with zeros."""
    gate, up, down = (given(weights, f"mlp.shared_expert.{name}_proj.weight") for name in ("gate", "up", "down"))
    missing = -len(gate) % size
    gate, up = (functional.pad(each, (0, 0, 0, missing)).view(-1, size, each.shape[1]) for each in (gate, up))
    down = functional.pad(down, (0, missing)).view(len(down), -1, size)
    return torch.cat((gate, up), dim=1), down.transpose(0, 1)
