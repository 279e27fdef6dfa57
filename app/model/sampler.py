"""Turns logits into token ids for the whole batch at once.

Randomness is a function, not a state. The noise for a token is a hash of (request seed, position, token id), so a
request draws the same tokens alone, in any batch, after preemption and on any replica. Tokens are drawn with the
Gumbel-max trick (argmax of logits plus Gumbel noise) from the tokens that the filters leave.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from operator import attrgetter

import torch

from app.engine.batch import ScheduledSequence
from app.engine.request import FILTERS
from app.model.inputs import bytes_to_device, to_device
from app.model.logprobs import Logprobs, compute_logprobs

# The constants of splitmix64 (Steele, Lea & Flood, 2014) as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

# The fields of `SamplingParams` that native samplers read for a draw, as int64 and as float32.
DRAW_INTEGERS = ("seed", *(name for name, value in FILTERS.items() if isinstance(value, int)))
DRAW_FLOATS = ("temperature", *(name for name, value in FILTERS.items() if isinstance(value, float)))
draw_numbers = attrgetter(*DRAW_INTEGERS, *DRAW_FLOATS)


class Sampler:
    """Selects a token for each row of a step, in plain torch on any device. Subclasses override parts of it.

    logits: [_, vocab_size], never changed. rows: the rows of the logits to read; each belongs to one of the `items`.
    """

    def sample(
        self, logits: torch.Tensor, items: Sequence[ScheduledSequence], *, likeliest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one token for each row. logits: [num_rows, vocab_size] → [num_rows] int64.

        A row's result depends only on that row. Rows whose logits need no adjustment are not copied.
        likeliest: [num_rows] int64, each row's argmax, if it is already known.
        """
        if not items:
            return torch.empty(0, dtype=torch.long, device=logits.device)
        changed = [row for row, item in enumerate(items) if not item.takes_all_logits]
        if not changed:
            return self._taken(logits, range(len(items)), items, likeliest)
        of_changed = [items[row] for row in changed]
        adjusted = self.adjust(logits, changed, of_changed)
        parts: list[tuple[Sequence[int], torch.Tensor]] = [
            (changed, self._taken(adjusted, range(len(changed)), of_changed, None))
        ]
        if len(changed) < len(items):
            plain = sorted(set(range(len(items))).difference(changed))
            parts.append((plain, self._taken(logits, plain, [items[row] for row in plain], likeliest)))
        return _in_order(parts)

    def draw(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Draw a token for each of the rows with temperature, filters and noise → [len(rows)] int64."""
        logits = logits[to_device(rows, logits.device)].float()

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return to_device(values, logits.device, dtype)[:, None]

        params = [item.sampling for item in items]
        if any(p.top_n_sigma for p in params):
            logits = _near_greatest(logits, column([p.top_n_sigma for p in params], torch.float32))
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

    def adjust(self, logits: torch.Tensor, rows: Sequence[int], items: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Copy rows and apply penalties, biases, bans, matchers, in this order → [len(rows), vocab_size] float32."""
        adjusted = logits[to_device(rows, logits.device)].float()
        numbered = [(row, item.adjustments) for row, item in enumerate(items) if item.adjustments is not None]
        _penalise_repetition(adjusted, [(row, each.seen, each.repetition_penalty) for row, each in numbered])
        _add(adjusted, [(row, each.deducted, each.deductions) for row, each in numbered])
        _add(adjusted, [(row, each.biased, each.biases) for row, each in numbered])
        _ban(adjusted, [(row, array("q", item.banned_token_ids)) for row, item in enumerate(items) if not item.matcher])
        matched = [row for row, item in enumerate(items) if item.matcher is not None]
        return _masked(adjusted, matched, joined_masks(items)) if matched else adjusted

    def logprobs(self, logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, *, num_top: int) -> Logprobs:
        """Return the log-softmax of the rows. token_ids: [len(rows)] int64, one token for each row."""
        return compute_logprobs(logits, rows, token_ids, num_top=num_top)

    def _taken(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        items: Sequence[ScheduledSequence],
        likeliest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the likeliest or a drawn token for each of the rows, whose logits are already adjusted."""
        greedy = [at for at, item in enumerate(items) if item.sampling.is_greedy]
        if not greedy:
            return self.draw(logits, rows, items)
        if len(greedy) == len(items):
            return _argmax(logits, rows, likeliest)
        drawn = sorted(set(range(len(items))).difference(greedy))
        return _in_order(
            [
                (greedy, _argmax(logits, [rows[at] for at in greedy], likeliest)),
                (drawn, self.draw(logits, [rows[at] for at in drawn], [items[at] for at in drawn])),
            ]
        )


def joined_masks(items: Sequence[ScheduledSequence]) -> bytearray:
    """Join the bit masks of the items that have a matcher (see `Matcher.allowed`)."""
    # The masks are built after the forward pass was launched, while the device may still be running it.
    return bytearray().join([item.allowed() for item in items if item.matcher is not None])


def _penalise_repetition(logits: torch.Tensor, entries: Sequence[tuple[int, array[int], float]]) -> None:
    """entries: (row, tokens, penalty)."""
    flat, places = logits.view(-1), _places(logits, [(row, tokens) for row, tokens, _ in entries])
    if not len(places):
        return
    lengths = to_device([len(tokens) for _, tokens, _ in entries], logits.device)
    penalties = to_device([penalty for _, _, penalty in entries], logits.device, torch.float32)
    penalties = penalties.repeat_interleave(lengths, output_size=len(places))
    before = flat[places]
    # A token that is listed twice is set to the same value twice.
    flat[places] = torch.where(before > 0, before / penalties, before * penalties)


def _add(logits: torch.Tensor, entries: Sequence[tuple[int, array[int], array[float]]]) -> None:
    """entries: (row, tokens, the values that are added to the tokens' logits)."""
    places = _places(logits, [(row, tokens) for row, tokens, _ in entries])
    if len(places):
        values = bytearray().join([values for _, _, values in entries])
        logits.view(-1).index_add_(0, places, bytes_to_device(values, torch.float32, logits.device))


def _ban(logits: torch.Tensor, entries: Sequence[tuple[int, array[int]]]) -> None:
    """entries: (row, tokens)."""
    places = _places(logits, entries)
    if len(places):
        logits.view(-1)[places] = float("-inf")


def _places(logits: torch.Tensor, entries: Sequence[tuple[int, array[int]]]) -> torch.Tensor:
    """Return the indices of the entries' tokens in the flat logits. entries: (row, tokens) → [num_tokens] int64."""
    device, joined = logits.device, bytearray().join([tokens for _, tokens in entries])
    if not joined:
        return torch.empty(0, dtype=torch.long, device=device)
    lengths = to_device([len(tokens) for _, tokens in entries], device)
    tokens = bytes_to_device(joined, torch.long, device)
    firsts = to_device([row * logits.shape[-1] for row, _ in entries], device)
    # Without `output_size` the host would wait for the lengths.
    return firsts.repeat_interleave(lengths, output_size=len(tokens)) + tokens


def _masked(logits: torch.Tensor, rows: Sequence[int], allowed: bytearray) -> torch.Tensor:
    packed = bytes_to_device(allowed, torch.uint8, logits.device).view(len(rows), -1)
    penalties = _penalties_of_bytes(logits.device)[packed.long()].view(len(rows), -1)[:, : logits.shape[-1]]
    return logits.index_add_(0, to_device(rows, logits.device), penalties)


@cache
def _penalties_of_bytes(device: torch.device) -> torch.Tensor:
    """Return each byte's penalties for eight tokens' logits: 0 for a set bit, -inf otherwise. [256, 8] float32."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill(bits == 0, float("-inf"))


def _argmax(logits: torch.Tensor, rows: Sequence[int], known: torch.Tensor | None) -> torch.Tensor:
    """rows: a list of rows, or a range, which must start at 0 and cover all rows in use."""
    of_all = logits if known is None else known
    of_rows = of_all[: len(rows)] if isinstance(rows, range) else of_all[to_device(rows, logits.device)]
    return of_rows.argmax(dim=-1) if known is None else of_rows


def _in_order(parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> torch.Tensor:
    """Return the tokens by place. parts: pairs (places, tokens) that together cover all places."""
    if len(parts) == 1:
        return parts[0][1]
    tokens = torch.cat([tokens for _, tokens in parts])
    places = [place for places, _ in parts for place in places]
    return torch.empty_like(tokens).index_copy_(0, to_device(places, tokens.device), tokens)


def _near_greatest(logits: torch.Tensor, num_sigmas: torch.Tensor) -> torch.Tensor:
    """Set logits to -inf that are more than `num_sigmas` standard deviations below the greatest (Tang et al., 2024).

    num_sigmas: [num_rows, 1]; 0 leaves the row unchanged. Only finite logits count for the deviation. The logits are
    not yet divided by the temperature, which would not change the result.
    """
    counts = logits.isfinite()
    num_counted = counts.sum(dim=-1, keepdim=True).clamp(min=1)
    numbers = logits.double().masked_fill(~counts, 0.0)
    # `cumsum` adds the numbers in order, whereas the order in `sum` depends on the number of rows.
    mean, mean_square = (each.cumsum(dim=-1)[:, -1:] / num_counted for each in (numbers, numbers.square()))
    deviation = (mean_square - mean.square()).clamp(min=0.0).sqrt()
    most = logits.masked_fill(~counts, float("-inf")).amax(dim=-1, keepdim=True)
    least = (most - num_sigmas.double() * deviation).float()
    return logits.masked_fill((num_sigmas > 0.0) & (logits < least), float("-inf"))


def _filtered(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set the logits that a row's filters remove to -inf. The likeliest token always remains.

    top_k, top_p, min_p: [num_rows, 1]. top-p applies to the tokens that top-k leaves (Holtzman et al., 2020). min-p is
    a fraction of the likeliest token's probability (Nguyen et al., 2024).
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
    """Return Gumbel(0, 1) noise as a pure function of (seed, position, token id).

    seeds, positions: [num_rows, 1] int64 → [num_rows, vocab_size] float32.
    """
    tokens = torch.arange(1, vocab_size + 1, device=seeds.device)
    key = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    bits = _mix(key + tokens * _GOLDEN)
    # 24 bits, centred, so that `uniform` is neither 0 nor 1 and log(-log(u)) is finite.
    uniform = (_shift(bits, 40).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically (torch's own shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
