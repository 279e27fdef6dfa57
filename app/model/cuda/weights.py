"""Fuses the weights of a Llama-like transformers model for the CUDA decoder, on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from app.model.attention import AttentionRules
from app.model.cpu.checkpoint import MappedModel
from app.model.cuda.fp8 import FP8, Fp8Rows, Rows, concatenated, in_fp8
from app.model.llama import (
    EMBEDDING,
    HEAD,
    QUERIES_KEYS_VALUES,
    DecoderSettings,
    Weights,
    given,
    joined_bias,
    named,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_StoredRows = Callable[[str], Fp8Rows | None]  # looks up a weight by name; None if the file does not store it in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayer:
    """The weights of one layer. Matrices are [outputs, inputs], as in torch, and may be in FP8."""

    input_norm: torch.Tensor  # [hidden_size]
    query_key_value: Rows  # outputs: the query heads, then the key heads, then the value heads
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: Rows
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor
    # [num_experts, hidden_size], or None without experts. A shared expert adds a row that computes its output's share.
    router: torch.Tensor | None
    # [2 * intermediate_size, hidden_size]; with experts [num_experts, 2 * inner size, hidden_size], never in FP8. The
    # shared expert is stored as pieces of the size of a routed expert.
    gate_up: Rows
    down: Rows  # [hidden_size, intermediate_size]; with experts [num_experts, hidden_size, inner size]
    rules: AttentionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWeights:
    """The weights of a whole model, or of one rank's part, on one device. Weights outside FP8 share one type."""

    settings: DecoderSettings
    layers: tuple[CudaLayer, ...]
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    final_norm: torch.Tensor
    head: torch.Tensor  # [vocab_size, hidden_size]; may be the embedding itself if the two are tied
    rotary: torch.Tensor  # [num_positions, head_dim]: the cosines of half a head, then the sines

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors. Tied tensors appear more than once."""
        parts: tuple[CudaWeights | CudaLayer, ...] = (self, *self.layers)
        for part in parts:
            for value in (getattr(part, each.name) for each in fields(part)):
                yield from value if isinstance(value, Fp8Rows) else (value,) if isinstance(value, torch.Tensor) else ()


@torch.inference_mode()
def fuse_weights(
    module: PreTrainedModel,
    settings: DecoderSettings,
    *,
    num_positions: int,
    quantised: bool = False,
    mapped: MappedModel | None = None,
) -> CudaWeights:
    """Fuse a model's weights layer by layer, and move the module to the meta device.

    Each layer's weights are freed once they are fused, so the device holds at most one layer twice.

    quantised: whether to convert the layers' matrices to FP8. Embedding and head are not converted.
    mapped: the files of a module without weights, which are read one matrix at a time. With `quantised`, a matrix that
    is stored in FP8 with at most one scale per row is used as stored.
    """
    weights: Weights = partial(_held, module) if mapped is None else mapped
    embedding = given(weights, EMBEDDING)
    is_read_once = mapped is not None and mapped.rank is None and module.config.tie_word_embeddings
    head = embedding if is_read_once else given(weights, HEAD)
    layers = []
    for index, (layer, each) in enumerate(zip(module.model.layers, settings.layers, strict=True)):
        own = partial(named, weights, f"model.layers.{index}.")
        matrix: Callable[..., Rows] = partial(_matrix, own)
        if quantised:
            matrix = partial(_matrix_in_fp8, own, _stored_rows(mapped, index))
        rules = AttentionRules(scaling=settings.scaling, sliding_window=each.sliding_window or None)
        layers.append(_fuse_layer(own, rules, matrix))
        layer.to(device="meta")
        if mapped is not None:
            mapped.checkpoint.release()
    final_norm = given(weights, "model.norm.weight")
    module.to(device="meta")
    positions = torch.arange(num_positions, device=embedding.device)
    return CudaWeights(
        settings=settings,
        layers=tuple(layers),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        rotary=settings.rotary[0].table(positions, embedding.dtype).flatten(1),
    )


def _held(module: PreTrainedModel, name: str) -> torch.Tensor | None:
    """Look up a weight in a module. Returns None if the module has no such weight."""
    place, _, own = name.rpartition(".")
    try:
        part = module.get_submodule(place)
        # A linear layer that is divided among ranks wraps this rank's linear layer.
        weight: torch.Tensor | None = getattr(getattr(part, "linear", part), own)
    except AttributeError:
        return None
    return None if weight is None else weight.detach()


def _matrix(weights: Weights, *linears: str) -> torch.Tensor:
    """Concatenate the weights of linear layers along their outputs."""
    found = [given(weights, f"{name}.weight") for name in linears]
    return found[0] if len(found) == 1 else torch.cat(found)


def _matrix_in_fp8(weights: Weights, stored: _StoredRows, *linears: str) -> Fp8Rows:
    """Concatenate the weights of linear layers like `_matrix`, converted to FP8 unless `stored` returns them in FP8."""
    found = ((name, stored(f"{name}.weight")) for name in linears)
    return concatenated([in_fp8(given(weights, f"{name}.weight")) if rows is None else rows for name, rows in found])


def _stored_rows(mapped: MappedModel | None, layer: int) -> _StoredRows:
    """Return a function that looks up a layer's weight by name if the files store it in FP8."""

    def stored(name: str) -> Fp8Rows | None:
        found = None if mapped is None else mapped.in_rows(f"model.layers.{layer}.{name}", FP8)
        return None if found is None else Fp8Rows(*found)

    return stored


def _fuse_layer(weights: Weights, rules: AttentionRules, matrix: Callable[..., Rows]) -> CudaLayer:
    """Fuse the weights of one layer. matrix: concatenates linear layers by name, in the type that the decoder needs."""
    router = weights("mlp.gate.weight")
    gate_up: Rows
    down: Rows
    if router is None:
        gate_up, down = matrix("mlp.gate_proj", "mlp.up_proj"), matrix("mlp.down_proj")
    else:
        router, gate_up, down = _fuse_experts(weights, router)
    return CudaLayer(
        input_norm=given(weights, "input_layernorm.weight"),
        query_key_value=matrix(*QUERIES_KEYS_VALUES),
        query_key_value_bias=joined_bias(weights, QUERIES_KEYS_VALUES),
        query_norm=weights("self_attn.q_norm.weight"),
        key_norm=weights("self_attn.k_norm.weight"),
        output=matrix("self_attn.o_proj"),
        output_bias=weights("self_attn.o_proj.bias"),
        post_attention_norm=given(weights, "post_attention_layernorm.weight"),
        router=router,
        gate_up=gate_up,
        down=down,
        rules=rules,
    )


def _fuse_experts(weights: Weights, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return router, gate_up and down as in `CudaLayer`. transformers has already joined the experts' matrices."""
    gate_up, down = (given(weights, f"mlp.experts.{name}_proj") for name in ("gate_up", "down"))
    own_share = weights("mlp.shared_expert_gate.weight")
    if own_share is None:
        return router, gate_up, down
    pieces = _pieces_of_shared_expert(weights, down.shape[-1])
    return torch.cat((router, own_share)), torch.cat((gate_up, pieces[0])), torch.cat((down, pieces[1]))


def _pieces_of_shared_expert(weights: Weights, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a shared expert into experts of this inner size, padded with zeros. Returns gate_up and down."""
    gate, up, down = (given(weights, f"mlp.shared_expert.{name}_proj.weight") for name in ("gate", "up", "down"))
    missing = -len(gate) % size
    gate, up = (functional.pad(each, (0, 0, 0, missing)).view(-1, size, each.shape[1]) for each in (gate, up))
    down = functional.pad(down, (0, missing)).view(len(down), -1, size)
    return torch.cat((gate, up), dim=1), down.transpose(0, 1)
