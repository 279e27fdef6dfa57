"""Logits to token ids for the whole batch at once.

Randomness is a function, not a state: the noise for a token is a hash of (request seed, position, token id), so a
request draws the same tokens alone, in any batch, after preemption and on any replica. Drawing is the Gumbel-max trick
(argmax of logits plus Gumbel noise) over the tokens that top-k, top-p and min-p leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from app.engine.batch import ScheduledSequence
from app.model.inputs import to_device

# splitmix64 (Steele, Lea & Flood, 2014), its constants as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class Draw(Protocol):
    """Draws a token for some rows by temperature, filters and noise."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """logits: [_, vocab_size] float32; one token for each of its `rows` → [len(rows)] int64."""
        ...


class Mask(Protocol):
    """Removes the tokens that are not allowed from some rows."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], allowed: bytearray) -> torch.Tensor:
        """The logits with -inf wherever the bit of one of `rows` is not set.

        logits: [num_rows, vocab_size] float32; allowed: each row's bits (see `Matcher.allowed`), one after the other.
        """
        ...


def draw(logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
    """Plain torch, on any device."""
    return _draw(logits[to_device(rows, logits.device)], items)


def mask(logits: torch.Tensor, rows: Sequence[int], allowed: bytearray) -> torch.Tensor:
    """Plain torch, on any device."""
    is_cuda = logits.is_cuda
    packed = torch.frombuffer(allowed, dtype=torch.uint8).view(len(rows), -1)
    packed = (packed.pin_memory() if is_cuda else packed).to(logits.device, non_blocking=is_cuda)
    penalties = _penalties_of_bytes(logits.device)[packed.long()].view(len(rows), -1)[:, : logits.shape[-1]]
    return logits.index_add(0, to_device(rows, logits.device), penalties)


@cache
def _penalties_of_bytes(device: torch.device) -> torch.Tensor:
    """For each byte, what its bits add to the logits of eight tokens: 0 for a set bit, else -inf. [256, 8] float32."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill(bits == 0, float("-inf"))


def sample(
    logits: torch.Tensor,
    items: Sequence[ScheduledSequence],
    *,
    likeliest: torch.Tensor | None = None,
    draw: Draw = draw,
    mask: Mask = mask,
) -> torch.Tensor:
    """One token for each row. logits: [num_rows, vocab_size] → [num_rows] int64.

    A row's result depends on that row alone. likeliest: [num_rows] int64, each row's argmax, if it is known already.
    """
    if likeliest is not None and all(_takes_likeliest(item) for item in items):
        return likeliest
    logits = _adjusted(logits.float(), items, mask)
    drawn = [row for row, item in enumerate(items) if not item.sampling.is_greedy]
    if drawn and len(drawn) == len(items):
        return draw(logits, range(len(items)), items)
    token_ids = logits.argmax(dim=-1)
    if drawn:
        token_ids[to_device(drawn, logits.device)] = draw(logits, drawn, [items[row] for row in drawn])
    return token_ids


def _takes_likeliest(item: ScheduledSequence) -> bool:
    sampling = item.sampling
    is_plain = item.history is None and item.matcher is None and not (sampling.logit_bias or item.banned_token_ids)
    return sampling.is_greedy and is_plain


def _adjusted(logits: torch.Tensor, items: Sequence[ScheduledSequence], mask: Mask) -> torch.Tensor:
    """Apply penalties, biases, bans and matchers, in this order, where a row has any."""
    penalised = [(row, item) for row, item in enumerate(items) if item.history is not None]
    if penalised:
        logits = _penalised(logits, penalised)
    biases = [(row, token, bias) for row, item in enumerate(items) for token, bias in item.sampling.logit_bias]
    if biases:
        where, values = _entries(biases, logits)
        logits = logits.index_put(where, values, accumulate=True)
    bans = [
        (row, token, float("-inf"))
        for row, item in enumerate(items)
        if item.matcher is None
        for token in item.banned_token_ids
    ]
    if bans:
        where, values = _entries(bans, logits)
        logits = logits.index_put(where, values)
    matched = [row for row, item in enumerate(items) if item.matcher is not None]
    if not matched:
        return logits
    # Only now and not before the forward pass: a device may still be computing it.
    allowed = bytearray().join([items[row].allowed() for row in matched])
    return mask(logits, matched if len(matched) < len(items) else range(len(items)), allowed)


def _penalised(logits: torch.Tensor, rows: list[tuple[int, ScheduledSequence]]) -> torch.Tensor:
    factors: list[tuple[int, int, float]] = []
    deductions: list[tuple[int, int, float]] = []
    for row, item in rows:
        assert item.history is not None, "only rows with a history are penalised"
        sampling, counts = item.sampling, Counter(item.history.generated)
        if sampling.repetition_penalty != 1.0:
            seen = counts.keys() | set(item.history.prompt)
            factors += [(row, token, sampling.repetition_penalty) for token in seen]
        if sampling.presence_penalty or sampling.frequency_penalty:
            deductions += [
                (row, token, -(sampling.presence_penalty + sampling.frequency_penalty * count))
                for token, count in counts.items()
            ]
    if factors:
        where, factor = _entries(factors, logits)
        seen_logits = logits[where]
        logits = logits.index_put(where, torch.where(seen_logits > 0, seen_logits / factor, seen_logits * factor))
    if deductions:
        where, deduction = _entries(deductions, logits)
        logits = logits.index_put(where, deduction, accumulate=True)
    return logits


def _entries(
    entries: list[tuple[int, int, float]], like: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(row, token, value) triples as an index pair and a float tensor."""
    rows, tokens, values = zip(*entries, strict=True)
    device = like.device
    return (to_device(rows, device), to_device(tokens, device)), to_device(values, device, like.dtype)


def _draw(logits: torch.Tensor, items: Sequence[ScheduledSequence]) -> torch.Tensor:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, logits.device, dtype)[:, None]

    params = [item.sampling for item in items]
    logits = logits / column([p.temperature for p in params], torch.float32)
    if any(p.top_k or p.top_p < 1.0 or p.min_p for p in params):
        logits = _filtered(
            logits,
            top_k=column([p.top_k or logits.shape[-1] for p in params], torch.long),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
        )
    seeds = column([p.seed for p in params], torch.long)
    positions = column([item.end for item in items], torch.long)
    return (logits + gumbel_noise(seeds, positions, vocab_size=logits.shape[-1])).argmax(dim=-1)


def _filtered(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what each row's filters take away; the likeliest token always stays.

    top_k, top_p, min_p: [num_rows, 1]. top-p counts within what top-k leaves (Holtzman et al., 2020); min-p is a share
    of the likeliest token's probability (Nguyen et al., 2024).
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    removed = (before >= top_p) | (probabilities < min_p * probabilities[:, :1])
    removed[:, 0] = False
    ordered = ordered.masked_fill(removed & ((top_p < 1.0) | (min_p > 0.0)), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, tokens, ordered)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise as a pure function of (seed, position, token id).

    seeds, positions: [num_rows, 1] int64 → [num_rows, vocab_size] float32.
    """
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    key = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    bits = _mix(key + tokens * _GOLDEN)
    # 24 bits, centred, so that neither 0 nor 1 occurs: log(-log(u)) is finite.
    uniform = (_shift(bits, 40).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
