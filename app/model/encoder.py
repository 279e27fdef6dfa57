"""Runs encoders, which read whole prompts and return vectors or, with a head, scores. They generate no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.engine.request import Pooling
from app.model.attention import check_call
from app.model.inputs import pooled_places, to_device
from app.model.pooling import PooledStates

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PACKED_ATTENTION_NAME = "carousel_packed"
Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Turns a cross-encoder's or classifier's state for a text into one score, or one score per label."""

    head: nn.Module  # [num_sequences, hidden_size] → logits [num_sequences, num_scores]
    activation: Activation
    reads_last: bool  # whether it reads the last token's state (causal models) or the first token's


class Encoder:
    """A model without its head. Packs all sequences of a step into one row, so that none is padded."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        """module: must attend with `packed_attention`."""
        self._module = module
        self._device = device
        self._has_types = has_token_types(module.config)
        embeddings = getattr(module, "embeddings", None)
        # RoBERTa's positions start after the padding id, and do not count padding tokens within a text.
        self._positions_of = getattr(embeddings, "create_position_ids_from_input_ids", None)
        self._padding_id = getattr(embeddings, "padding_idx", None)

    @property
    def vocab_size(self) -> int:
        return int(self._module.get_input_embeddings().weight.shape[0])

    @property
    def num_unused_positions(self) -> int:
        """The number of positions that no token can use. It shortens the longest text that the model accepts."""
        return 0 if self._positions_of is None else 1 + int(self._padding_id or 0)

    def states(self, sequences: tuple[ScheduledSequence, ...]) -> torch.Tensor:
        """Return each token's last hidden state, [num_tokens, hidden_size]."""
        token_ids = to_device([token_id for item in sequences for token_id in item.token_ids], self._device)
        lengths = [len(item.token_ids) for item in sequences]
        types = {}
        if self._has_types:
            of_tokens = list(chain.from_iterable(map(token_types, sequences)))
            types["token_type_ids"] = to_device(of_tokens, self._device)[None]
        output = self._module(
            input_ids=token_ids[None],
            position_ids=self._positions(token_ids, lengths)[None],
            use_cache=False,
            packed=list(pairwise(accumulate(lengths, initial=0))),
            **types,
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def _positions(self, token_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        if self._positions_of is None:
            return to_device(list(chain.from_iterable(map(range, lengths))), self._device)
        parts = torch.split(token_ids, lengths)
        return torch.cat([self._positions_of(part[None], self._padding_id)[0] for part in parts])


class EncoderRunner(ModelRunner):
    """Runs steps of whole prompts. Returns a vector for each prompt, or its scores if the model has a head."""

    def __init__(self, encoder: Encoder, device: torch.device, score: ScoreHead | None = None) -> None:
        self._encoder = encoder
        self._device = device
        self._score = score

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        states = self._encoder.states(batch.scheduled)
        if self._score is not None:
            scores = scores_of(states, batch.scheduled, self._score).float().tolist()
            return StepResult([], pooled={item.request_id: s for item, s in zip(batch.scheduled, scores, strict=True)})
        pooled = PooledStates(batch, states[to_device(pooled_places(batch.scheduled), self._device)])
        return StepResult([], pooled=pooled.result(pooled.sums))


def scores_of(states: torch.Tensor, sequences: tuple[ScheduledSequence, ...], score: ScoreHead) -> torch.Tensor:
    """Return scores, or logits for sequences that request them, [num_sequences, num_scores]. See `Encoder.states`."""
    lengths = [len(item.token_ids) for item in sequences]
    ends = list(accumulate(lengths))
    places = [end - 1 if score.reads_last else end - length for end, length in zip(ends, lengths, strict=True)]
    logits: torch.Tensor = score.head(states[to_device(places, states.device)])
    is_raw = [item.pooling == Pooling.LOGIT for item in sequences]
    if all(is_raw):
        return logits
    scores = score.activation(logits)
    return torch.where(to_device(is_raw, states.device, torch.bool)[:, None], logits, scores) if any(is_raw) else scores


def has_token_types(config: PreTrainedConfig) -> bool:
    """Return whether the model needs token types to tell the two texts of a pair apart."""
    return (getattr(config, "type_vocab_size", None) or 1) > 1


def token_types(item: ScheduledSequence) -> list[int]:
    """Return each token's type: 0 in the first text of a pair, 1 in the second."""
    num_tokens, at = len(item.token_ids), item.second_text_at
    return [0] * num_tokens if at == 0 else [0] * at + [1] * (num_tokens - at)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    packed: Sequence[tuple[int, int]] | None = None,  # each sequence's first token and end
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over whole sequences that are packed in one row. Each attends only to itself, without KV memory.

    Causal models attend backwards only, other models in both directions. Follows transformers' attention
    interface; returns [1, num_tokens, num_heads, value_dim] and None.
    """
    check_call(packed, attention_mask, others)
    assert packed is not None, "`check_call` raises for None"
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for first, end in packed:
        attended = functional.scaled_dot_product_attention(
            query[:, :, first:end],
            key[:, :, first:end],
            value[:, :, first:end],
            scale=scaling,
            is_causal=bool(getattr(module, "is_causal", True)),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output[:, first:end] = attended.transpose(1, 2)
    return output, None
