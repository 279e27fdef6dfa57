"""Triton kernels that draw tokens; `sampler.py` launches them. Imported only there, on first use, because importing it
needs Triton.

One program draws one row, alone: no bit of its result depends on how many rows there are. Filters have no sort. The
last token that top-k or top-p keeps is found by its *key*, an unsigned number in the order of the logits, digit by
digit: each pass over the row measures what lies above 16 candidates at once. Keys of bfloat16 have 4 digits, of
float32 8.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x):
    """splitmix64 (Steele, Lea & Flood, 2014), as in `app/model/sampler.py`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(key, tokens):
    """Gumbel noise of 24 random bits, within some 1e-6 of `sampler.gumbel_noise`, which computes in float64."""
    bits = (_mix(key + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 40).to(tl.int32)
    # u = (bits + 0.5) / 2^24 and 1 - u are both exact where they are small. log(u) from whichever is smaller (log1p as
    # in Goldberg, 1991).
    u = (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-8
    rest = ((16777216 - bits).to(tl.float32) - 0.5) * 5.9604644775390625e-8
    y = 1.0 - rest
    near_one = tl.where(y == 1.0, -rest, tl.log(y) * rest / tl.where(y == 1.0, 1.0, 1.0 - y))
    return -tl.log(-tl.where(u < 0.5, tl.log(u), near_one))


@triton.jit
def _load(row, mask, has_mask, tokens, vocab_size):
    """Logits as float32; -inf where they are no number or the row's mask (see `Matcher.allowed`) has no bit."""
    is_token = tokens < vocab_size
    logits = tl.load(row + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    bits = tl.load(mask + tokens // 8, mask=is_token & has_mask, other=255).to(tl.int32)
    return tl.where(((bits >> (tokens % 8)) & 1 != 0) & (logits == logits), logits, float("-inf"))


@triton.jit
def _key(logits, unused: tl.constexpr):
    """Unsigned integers in the order of the logits. unused: low bits that are zero in all of them."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 equals 0
    flipped = bits.to(tl.uint32, bitcast=True) ^ ((bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000)
    return flipped >> unused


@triton.jit
def _logit_of(key, unused: tl.constexpr):
    """The logit that has this key."""
    flipped = key << unused
    bits = tl.where(flipped >> 31 != 0, flipped ^ 0x80000000, flipped ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits, most, scale):
    """Probability over that of the likeliest token. scale: log2(e) / temperature."""
    # Where all are -inf, -inf - -inf is not a number.
    return tl.where(logits == most, 1.0, tl.exp2((logits - tl.maximum(most, -3.0e38)) * scale))


@triton.jit
def _most(row, mask, has_mask, vocab_size, tile: tl.constexpr):
    """The greatest logit."""
    most = tl.full([tile], float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        most = tl.maximum(most, _load(row, mask, has_mask, start + tl.arange(0, tile), vocab_size))
    return tl.max(most, 0)


@triton.jit
def _edge(
    row,
    mask,
    has_mask,
    vocab_size,
    wanted,  # of the sum, where is_mass a share of it
    least,  # a key: tokens with lower ones do not count
    excess,  # tokens with the key `least` that do not count
    most,
    scale,
    is_mass: tl.constexpr,  # sums of weights; else of tokens
    unused: tl.constexpr,
    tile: tl.constexpr,
):
    """The greatest key from which on tokens reach a sum: (key, how many of the tokens with this key that takes, how
    much more than the sum all of them reach)."""
    digits = tl.arange(0, 16).to(tl.uint32)
    edge = least * 0
    too_many = 0.0
    if excess > 0.0:
        too_many = excess * _weight(_logit_of(least, unused), most, scale)
    above, reached = 0.0, 0.0  # by tokens with greater keys; by those with this key, too
    num_digits: tl.constexpr = (32 - unused + 3) // 4
    for at in range(num_digits):
        shift = 4 * (num_digits - 1 - at)
        candidates = edge | (digits << shift)
        sums = tl.zeros([16, tile], tl.float32)
        for start in range(0, vocab_size, tile):
            tokens = start + tl.arange(0, tile)
            logits = _load(row, mask, has_mask, tokens, vocab_size)
            keys = _key(logits, unused)
            weights = tl.where((keys >= least) & (tokens < vocab_size), 1.0, 0.0)
            if is_mass:
                weights *= _weight(logits, most, scale)
            sums += tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0)
        from_candidate = tl.sum(sums, 1)  # falling
        if is_mass:  # the first candidate of all is 0, from which on all tokens count
            wanted *= tl.where(at == 0, tl.max(from_candidate, 0) - too_many, 1.0)
        reaches = from_candidate >= wanted
        digit = tl.maximum(tl.sum(reaches.to(tl.int32), 0) - 1, 0)
        edge = edge | (digit.to(tl.uint32) << shift)
        above = tl.max(tl.where(reaches, above, from_candidate), 0)
        reached = tl.min(tl.where(reaches, from_candidate, float("inf")), 0)
    num_ties = wanted - above
    if is_mass:
        num_ties = tl.ceil(num_ties / _weight(_logit_of(edge, unused), most, scale))
    return edge, tl.maximum(num_ties, 1.0), reached - wanted


@triton.jit
def draw_kernel(
    logits,  # [_, vocab_size]
    row_stride,
    vocab_size,
    facts,  # [num_rows, 8] int64: row, place in token_ids, mask (-1: none), seed, position, top-k (0: none), numbers
    numbers,  # the same memory as float32, [num_rows, 16]: from the 13th on temperature (0: greedy), top-p, min-p
    masks,  # [_, mask_bytes] uint8
    mask_bytes,
    token_ids,  # [_] int64
    unused: tl.constexpr,
    tile: tl.constexpr,
):
    """One token for each row. Grid: (num_rows,)."""
    facts += tl.program_id(0) * 8
    numbers += tl.program_id(0) * 16 + 12
    row = logits + tl.load(facts) * row_stride
    mask_row, top_k = tl.load(facts + 2), tl.load(facts + 5)
    has_mask = mask_row >= 0
    mask = masks + tl.maximum(mask_row, 0) * mask_bytes
    temperature, top_p, min_p = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    is_drawn = temperature > 0.0
    temperature = tl.where(is_drawn, temperature, 1.0)

    has_weights = (top_p < 1.0) | (min_p > 0.0)
    scale = LOG2_E / temperature
    most, num_ties, excess = 0.0, 0.0, 0.0
    edge = tl.full([], 0, tl.uint32)  # tokens with greater keys stay, and the first `num_ties` with this one
    if has_weights:
        most = _most(row, mask, has_mask, vocab_size, tile)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k:
        edge, num_ties, excess = _edge(
            row, mask, has_mask, vocab_size, top_k.to(tl.float32), edge, 0.0, most, scale, False, unused, tile
        )
    if top_p < 1.0:
        edge, num_ties, excess = _edge(
            row, mask, has_mask, vocab_size, top_p, edge, excess, most, scale, True, unused, tile
        )

    has_edge = has_top_k | (top_p < 1.0)
    key = _mix(
        _mix(tl.load(facts + 3).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
        + tl.load(facts + 4).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    )
    best = tl.full([tile], float("-inf"), tl.float32)
    best_tokens = tl.zeros([tile], tl.int32)
    num_seen = 0  # tokens with the key `edge`
    for start in range(0, vocab_size, tile):
        tokens = start + tl.arange(0, tile)
        row_logits = _load(row, mask, has_mask, tokens, vocab_size)
        scores = tl.div_rn(row_logits, temperature)
        if has_edge:
            keys = _key(row_logits, unused)
            is_tie = (keys == edge) & (tokens < vocab_size)
            ordinals = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
            num_seen += tl.sum(is_tie.to(tl.int32), 0)
            stays = (keys > edge) | (is_tie & (ordinals <= num_ties))
            scores = tl.where(stays, scores, float("-inf"))
        if min_p > 0.0:
            scores = tl.where(_weight(row_logits, most, scale) >= min_p, scores, float("-inf"))
        if is_drawn:
            scores += _noise(key, tokens)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_tokens = tl.where(is_better, tokens, best_tokens)
    greatest = tl.max(best, 0)
    # Of equal ones the first token; 0 where none may be drawn.
    token = tl.min(tl.where(best == greatest, best_tokens, vocab_size), 0)
    tl.store(token_ids + tl.load(facts + 1), tl.where(greatest > float("-inf"), token, 0).to(tl.int64))
