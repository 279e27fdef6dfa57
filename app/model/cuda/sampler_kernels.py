"""Triton kernels that draw tokens and compute log-probabilities. `sampler.py` imports them on first use (needs Triton).

One program computes one row, so the bits of a result do not depend on the number of rows. Filters do not sort: top-k
and top-p find their last token by its *key*, an unsigned number in the order of the logits, digit by digit. Each pass
over the row sums up the tokens from each of 16 candidates on. Keys of bfloat16 have 4 digits, and float32 keys have 8.

Triton reads the annotations, so this module has no `from __future__ import annotations`.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x):
    """Mix the bits of a number with splitmix64 (Steele, Lea & Flood, 2014), as in `app/model/sampler.py`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(key, tokens):
    """Return Gumbel noise of 24 random bits, within some 1e-6 of `sampler.gumbel_noise`, which computes in float64."""
    bits = (_mix(key + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 40).to(tl.int32)
    # u = (bits + 0.5) / 2^24 and 1 - u are both exact where they are small. log(u) is computed from the smaller one,
    # from 1 - u with log1p (Goldberg, 1991).
    u = (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-8
    rest = ((16777216 - bits).to(tl.float32) - 0.5) * 5.9604644775390625e-8
    y = 1.0 - rest
    near_one = tl.where(y == 1.0, -rest, tl.log(y) * rest / tl.where(y == 1.0, 1.0, 1.0 - y))
    return -tl.log(-tl.where(u < 0.5, tl.log(u), near_one))


@triton.jit
def _behind(bits, vocab_size):
    """Return a pointer to the changed logits, which follow the bits."""
    return (bits + (vocab_size + 31) // 32).to(tl.pointer_type(tl.float32))


@triton.jit
def _changed(row, rows, values, vocab_size, layout: tl.constexpr, tile: tl.constexpr):
    """Update the entries of a sequence, and write a row's changed logits to scratch memory. Returns the bits.

    Scratch memory has a bit for each token, followed by the changed logits. rows: from this row on (`draw_kernel`).
    """
    changes, num_changes = values + tl.load(rows + layout.changes), tl.load(rows + layout.num_changes)
    bans, num_bans = values + tl.load(rows + layout.bans), tl.load(rows + layout.num_bans)
    entries = tl.load(rows + layout.entries).to(tl.pointer_type(tl.int32))
    num_entries = tl.load(rows + layout.num_entries)
    bits = tl.load(rows + layout.scratch).to(tl.pointer_type(tl.int32))
    logits = _behind(bits, vocab_size)
    for start in range(0, num_changes, tile):
        at = start + tl.arange(0, tile)
        place = tl.load(changes + 5 * at, mask=at < num_changes, other=0)
        for field in tl.static_range(4):
            new = tl.load(changes + 5 * at + 1 + field, mask=at < num_changes, other=0)
            tl.store(entries + 4 * place + field, new, mask=at < num_changes)
    for start in range(0, (vocab_size + 31) // 32, tile):
        at = start + tl.arange(0, tile)
        tl.store(bits + at, tl.zeros([tile], tl.int32), mask=at < (vocab_size + 31) // 32)
    tl.debug_barrier()  # the next loop reads numbers that other threads have stored
    for start in range(0, num_entries, tile):
        at = start + tl.arange(0, tile)
        is_entry = at < num_entries
        tokens = tl.load(entries + 4 * at, mask=is_entry, other=0)
        numbers = (entries + 4 * at).to(tl.pointer_type(tl.float32))
        factor = tl.load(numbers + 1, mask=is_entry, other=1.0)
        before = tl.load(row + tokens, mask=is_entry, other=0.0).to(tl.float32)
        after = tl.where(before > 0.0, tl.div_rn(before, factor), before * factor)
        after += tl.load(numbers + 2, mask=is_entry, other=0.0)
        after += tl.load(numbers + 3, mask=is_entry, other=0.0)
        tl.store(logits + tokens, after, mask=is_entry)
        tl.atomic_or(bits + tokens // 32, 1 << (tokens % 32), mask=is_entry, sem="relaxed", scope="cta")
    tl.debug_barrier()
    for start in range(0, num_bans, tile):
        at = start + tl.arange(0, tile)
        tokens = tl.load(bans + at, mask=at < num_bans, other=0)
        tl.store(logits + tokens, float("-inf"), mask=at < num_bans)
        tl.atomic_or(bits + tokens // 32, 1 << (tokens % 32), mask=at < num_bans, sem="relaxed", scope="cta")
    tl.debug_barrier()
    return bits


@triton.jit
def _load(row, tokens, vocab_size):
    """Load changed logits as float32, or -inf: for NaN, below `least`, and without a bit in `Matcher.allowed`."""
    logits, mask, has_mask, bits, has_changes, least = row
    is_token = tokens < vocab_size
    found = tl.load(logits + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if has_changes:
        # Read the bits as bytes, so that as many threads share a byte as with a mask.
        byte = tl.load(bits.to(tl.pointer_type(tl.uint8)) + tokens // 8, mask=is_token, other=0).to(tl.int32)
        is_changed = (byte >> (tokens % 8)) & 1 != 0
        changed = tl.load(_behind(bits, vocab_size) + tokens, mask=is_changed, other=0.0)
        found = tl.where(is_changed, changed, found)
    allowed = tl.load(mask + tokens // 8, mask=is_token & has_mask, other=255).to(tl.int32)
    return tl.where(((allowed >> (tokens % 8)) & 1 != 0) & (found >= least), found, float("-inf"))


@triton.jit
def _key(logits, unused):
    """Return unsigned integers in the order of the logits. unused: the number of low bits that are always zero."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 equals 0
    flipped = bits.to(tl.uint32, bitcast=True) ^ ((bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000)
    return flipped >> unused


@triton.jit
def _logit_of(key, unused):
    """Return the logit that has this key."""
    flipped = key << unused
    all_ones = tl.full([], 0xFFFFFFFF, tl.uint32) >> unused
    bits = tl.where(flipped >> 31 != 0, flipped ^ 0x80000000, (key ^ all_ones) << unused)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weight(logits, most, scale):
    """Return the probability divided by that of the likeliest token. scale: log2(e) / temperature."""
    # If all logits are -inf, -inf - -inf would be NaN.
    return tl.where(logits == most, 1.0, tl.exp2((logits - tl.maximum(most, -3.0e38)) * scale))


@triton.jit
def _most(row, vocab_size, tile: tl.constexpr):
    """Return the greatest logit."""
    most = tl.full([tile], float("-inf"), tl.float32)
    for start in range(0, vocab_size, tile):
        most = tl.maximum(most, _load(row, start + tl.arange(0, tile), vocab_size))
    return tl.max(most, 0)


@triton.jit
def _deviation(row, vocab_size, tile: tl.constexpr):
    """Return the standard deviation of the finite logits."""
    sums, numbers, squares = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32)
    for start in range(0, vocab_size, tile):
        logits = _load(row, start + tl.arange(0, tile), vocab_size)
        counts = tl.abs(logits) < float("inf")
        sums += tl.where(counts, logits, 0.0)
        numbers += counts.to(tl.float32)
    number = tl.maximum(tl.sum(numbers, 0), 1.0)
    mean = tl.sum(sums, 0) / number
    for start in range(0, vocab_size, tile):
        logits = _load(row, start + tl.arange(0, tile), vocab_size)
        distances = tl.where(tl.abs(logits) < float("inf"), logits - mean, 0.0)
        squares += distances * distances
    return tl.sqrt_rn(tl.sum(squares, 0) / number)


@triton.jit
def _edge(
    row,
    vocab_size,
    wanted,  # the sum to reach: a number of tokens, or with `is_mass` a share of the sum of all weights
    least,  # tokens with keys below this key do not count
    excess,  # the number of tokens with the key `least` that do not count
    most,
    scale,
    is_mass: tl.constexpr,  # whether to sum weights instead of tokens
    unused,
    tile: tl.constexpr,
):
    """Find the greatest key at which the tokens with this or a greater key reach the wanted sum.

    Returns (the key, the number of tokens with this key that the sum needs, the excess of all of them over the sum)."""
    digits = tl.arange(0, 16).to(tl.uint32)
    edge = least * 0
    too_many = 0.0
    if excess > 0.0:
        too_many = excess * _weight(_logit_of(least, unused), most, scale)
    above, reached = 0.0, 0.0  # the sums of the tokens with greater keys, without and with those of this key
    num_digits = (35 - unused.to(tl.int32)) // 4
    for at in range(num_digits):
        shift = (4 * (num_digits - 1 - at)).to(tl.uint32)
        candidates = edge | (digits << shift)
        sums = tl.zeros([16, tile], tl.float32)
        for start in range(0, vocab_size, tile):
            tokens = start + tl.arange(0, tile)
            logits = _load(row, tokens, vocab_size)
            keys = _key(logits, unused)
            weights = tl.where((keys >= least) & (tokens < vocab_size), 1.0, 0.0)
            if is_mass:
                weights *= _weight(logits, most, scale)
            sums += tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0)
        from_candidate = tl.sum(sums, 1)  # descending
        if is_mass:  # the first candidate of all is 0, so its sum is the sum of all tokens
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
def _best(row, vocab_size, filters, key, temperature, unused, tile: tl.constexpr):
    """Return the token with the greatest score that passes the filters, or 0 if no token does.

    filters: with `has_edge`, tokens with a greater key than `edge` pass, and the first `num_ties` tokens with this key.
    A token also needs at least `min_p` of the probability of the token with the logit `most`.
    """
    edge, num_ties, has_edge, min_p, most, scale = filters
    is_drawn = temperature > 0.0
    divisor = tl.where(is_drawn, temperature, 1.0)
    best = tl.full([tile], float("-inf"), tl.float32)
    best_tokens = tl.zeros([tile], tl.int32)
    num_seen = 0  # tokens with the key `edge`
    for start in range(0, vocab_size, tile):
        tokens = start + tl.arange(0, tile)
        logits = _load(row, tokens, vocab_size)
        scores = tl.div_rn(logits, divisor)
        if has_edge:
            keys = _key(logits, unused)
            is_tie = (keys == edge) & (tokens < vocab_size)
            ordinals = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
            num_seen += tl.sum(is_tie.to(tl.int32), 0)
            stays = (keys > edge) | (is_tie & (ordinals <= num_ties))
            scores = tl.where(stays, scores, float("-inf"))
        if min_p > 0.0:
            scores = tl.where(_weight(logits, most, scale) >= min_p, scores, float("-inf"))
        if is_drawn:
            scores += _noise(key, tokens)
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_tokens = tl.where(is_better, tokens, best_tokens)
    greatest = tl.max(best, 0)
    token = tl.min(tl.where(best == greatest, best_tokens, vocab_size), 0)  # the first of equal ones
    return tl.where(greatest > float("-inf"), token, 0)


@triton.jit
def draw_kernel(
    logits,  # [num_rows, vocab_size]
    row_stride,
    vocab_size,
    # [num_rows, layout.size] int64: first byte of the mask (0 for none), first int32 and number of changes, first int32
    # and number of bans, address and number of entries, address of scratch memory (0 if no logits change), position,
    # and the numbers of `SamplingParams` (temperature 0 for greedy). These rows are followed by the bytes of masks and
    # the int32 of changes and bans.
    rows,
    token_ids,  # [num_rows] int64
    layout: tl.constexpr,  # `ROW_LAYOUT` in `sampler.py`
    unused: tl.constexpr,
    tile: tl.constexpr,
):
    """Draw one token for each row. Grid: (num_rows,).

    An entry is a token whose logit changes: its id, its repetition penalty, and two numbers that are added one by one.
    A change is the place of an entry among the sequence's entries on the device, followed by the entry.
    """
    masks, values = rows.to(tl.pointer_type(tl.uint8)), rows.to(tl.pointer_type(tl.int32))
    rows += tl.program_id(0) * layout.size
    numbers = rows.to(tl.pointer_type(tl.float32))
    temperature = tl.load(numbers + layout.temperature)
    top_p, min_p = tl.load(numbers + layout.top_p), tl.load(numbers + layout.min_p)
    top_n_sigma = tl.load(numbers + layout.top_n_sigma)
    logits += tl.program_id(0).to(tl.int64) * row_stride
    bits, has_changes = values, tl.load(rows + layout.scratch) != 0
    if has_changes:
        bits = _changed(logits, rows, values, vocab_size, layout, tile)
    mask = tl.load(rows + layout.mask)
    row = (logits, masks + mask, mask > 0, bits, has_changes, float("-inf"))
    # Entries make logits that use all bits of a float32. A ban makes -inf, which has the same unused bits.
    unused_bits = tl.where(tl.load(rows + layout.num_entries) > 0, 0, unused).to(tl.uint32)

    scale = LOG2_E / tl.where(temperature > 0.0, temperature, 1.0)
    most, num_ties, excess = 0.0, 0.0, 0.0
    edge = tl.full([], 0, tl.uint32)
    if (top_p < 1.0) | (min_p > 0.0) | (top_n_sigma > 0.0):
        most = _most(row, vocab_size, tile)
    least = float("-inf")
    if top_n_sigma > 0.0:  # Tang et al., 2024
        least = most - top_n_sigma * _deviation(row, vocab_size, tile)
    row = (logits, masks + mask, mask > 0, bits, has_changes, least)
    top_k = tl.load(rows + layout.top_k)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k:
        edge, num_ties, excess = _edge(
            row, vocab_size, top_k.to(tl.float32), edge, 0.0, most, scale, False, unused_bits, tile
        )
    if top_p < 1.0:
        edge, num_ties, excess = _edge(row, vocab_size, top_p, edge, excess, most, scale, True, unused_bits, tile)
    seed = tl.load(rows + layout.seed).to(tl.uint64, bitcast=True)
    position = tl.load(rows + layout.position).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    filters = (edge, num_ties, has_top_k | (top_p < 1.0), min_p, most, scale)
    token = _best(row, vocab_size, filters, key, temperature, unused_bits, tile)
    tl.store(token_ids + tl.program_id(0), token.to(tl.int64))


@triton.jit
def _note_greatest(row, vocab_size, num_top, token_ids, numbers, unused, tile: tl.constexpr):
    """Store the greatest logits of a row and their tokens, in the order of the tokens."""
    least = tl.full([], 0, tl.uint32)
    edge, num_ties, _ = _edge(row, vocab_size, num_top.to(tl.float32), least, 0.0, 0.0, 1.0, False, unused, tile)
    num_stored, num_seen = 0, 0
    for start in range(0, vocab_size, tile):
        tokens = start + tl.arange(0, tile)
        logits = _load(row, tokens, vocab_size)
        keys = _key(logits, unused)
        is_tie = (keys == edge) & (tokens < vocab_size)
        ordinals = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
        num_seen += tl.sum(is_tie.to(tl.int32), 0)
        is_one = (keys > edge) | (is_tie & (ordinals <= num_ties))
        places = num_stored + tl.cumsum(is_one.to(tl.int32), 0) - 1
        num_stored += tl.sum(is_one.to(tl.int32), 0)
        tl.store(token_ids + places, tokens.to(tl.int64), mask=is_one)
        tl.store(numbers + places, logits, mask=is_one)
    tl.debug_barrier()  # the caller reads numbers that other threads have stored


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    logits,  # [_, vocab_size]
    row_stride,
    vocab_size,
    rows,  # [num_rows] int64
    token_ids,  # [num_rows] int64
    num_top,
    normalisers,  # [num_rows] float32
    logprobs,  # [num_rows] float32: the log-probability of each row's token
    ranks,  # [num_rows] int64, from 1
    top_token_ids,  # [num_rows, num_top] int64, the likeliest first, and equal ones by ascending id
    top_logprobs,  # [num_rows, num_top] float32
    unused: tl.constexpr,
    most_top: tl.constexpr,  # a power of two
    tile: tl.constexpr,
):
    """Compute the log-softmax of some rows at one token and at the likeliest tokens. Grid: (num_rows,)."""
    at = tl.program_id(0)
    logits += tl.load(rows + at) * row_stride
    row = (logits, logits.to(tl.pointer_type(tl.uint8)), False, rows, False, float("-inf"))  # no mask, no changes
    unused_bits = tl.full([], unused, tl.uint32)
    most = _most(row, vocab_size, tile)
    own = tl.load(logits + tl.load(token_ids + at)).to(tl.float32)
    own = tl.where(own == own, own, float("-inf"))
    weights, num_greater = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.int32)
    for start in range(0, vocab_size, tile):
        tokens = start + tl.arange(0, tile)
        found = _load(row, tokens, vocab_size)
        weights += tl.where(tokens < vocab_size, _weight(found, most, LOG2_E), 0.0)
        num_greater += (found > own).to(tl.int32)
    # Each log-probability is one subtraction from a logit, so equal logits have equal log-probabilities.
    normaliser = tl.maximum(most, -3.0e38) + tl.log(tl.sum(weights, 0))
    tl.store(normalisers + at, normaliser)
    tl.store(logprobs + at, own - normaliser)
    tl.store(ranks + at, 1 + tl.sum(num_greater, 0).to(tl.int64))
    if num_top > 0:
        top_token_ids += at * num_top
        top_logprobs += at * num_top
        _note_greatest(row, vocab_size, num_top, top_token_ids, top_logprobs, unused_bits, tile)
        these = tl.arange(0, most_top)
        top = tl.load(top_logprobs + these, mask=these < num_top, other=float("-inf"))
        tokens = tl.load(top_token_ids + these, mask=these < num_top, other=0)
        is_tie = (top[None, :] == top[:, None]) & (these[None, :] < these[:, None])
        places = tl.sum(((top[None, :] > top[:, None]) | is_tie).to(tl.int32), 1)
        tl.debug_barrier()  # all threads have read before one stores
        tl.store(top_logprobs + places, top - normaliser, mask=these < num_top)
        tl.store(top_token_ids + places, tokens, mask=these < num_top)
