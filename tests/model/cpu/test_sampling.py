from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from app.engine.batch import ScheduledSequence
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import TokenSet
from app.engine.request import FILTERS as COMMON
from app.engine.request import SamplingParams
from app.model.cpu.library import Draw, ThreadPool, library
from app.model.cpu.sampling import NativeSampler
from app.model.sampler import Sampler, draw_numbers, gumbel_noise
from tests.kit.models import scheduled
from tests.model.test_sampler import AT_THE_ENDS

FILTERS = [
    {},
    *({name: value} for name, value in COMMON.items()),
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.2, "top_k": 50},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {**COMMON, "min_p": 0.01, "top_p": 0.95, "top_k": 40},
]


PLAIN = Sampler()


@pytest.fixture(scope="module")
def native() -> NativeSampler:
    return native_sampler()


def native_sampler() -> NativeSampler:
    if library() is None:
        pytest.skip("no C++ compiler here")
    return NativeSampler(ThreadPool(2))


def items(num_rows: int, *, seed: int = 0, **sampling: float) -> list[ScheduledSequence]:
    seeds = [((row * 7919 + seed) * 2**40 - 5) % 2**63 for row in range(num_rows)]
    return [scheduled(1, row, seed=each, **sampling) for row, each in enumerate(seeds)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_the_same_tokens_as_the_plain_sampler(native: NativeSampler, filters: dict[str, float], spread: float) -> None:
    """But for logarithms that differ in the last place, and sums at the very edge of top-p."""
    torch.manual_seed(0)
    logits = torch.randn(200, 1003) * spread
    rows = list(range(199, -1, -1))
    sequences = items(200, temperature=0.7, **filters)
    expected, got = (way.draw(logits, rows, sequences) for way in (PLAIN, native))
    assert (expected != got).sum() <= 1
    assert len(set(got.tolist())) > 20


def test_each_parameter_of_a_draw_has_its_place_in_the_structure() -> None:
    sampling = SamplingParams(max_tokens=1, seed=7, temperature=0.25, **COMMON)
    draw = Draw.from_buffer_copy(struct.pack("=" + Draw.packing(), 3, *draw_numbers(sampling)))
    assert draw.position == 3
    for name in ("seed", "temperature", *COMMON):
        assert getattr(draw, name) == pytest.approx(getattr(sampling, name)), name


@pytest.mark.parametrize("sampling", AT_THE_ENDS, ids=str)
def test_the_same_tokens_at_the_ends_of_the_ranges(native: NativeSampler, sampling: dict[str, float]) -> None:
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(0)) * 1000
    sequences = [scheduled(1, row, seed=row, prompt=(0, 1, 2), **sampling) for row in range(9)]
    assert native.sample(logits, sequences).tolist() == PLAIN.sample(logits, sequences).tolist()


def test_what_is_masked_is_never_drawn_and_ties_go_to_the_first(native: NativeSampler) -> None:
    logits = torch.full((4, 100), float("-inf"))
    logits[:, 37] = -1e30
    assert native.draw(logits, range(4), items(4)).tolist() == [37] * 4
    logits[:, 37:60] = 2.0
    assert set(native.draw(logits, range(4), items(4, top_k=1)).tolist()) == {37}
    assert set(native.draw(logits, range(4), items(4, top_k=3)).tolist()) <= {37, 38, 39}


@pytest.mark.parametrize("way", ["plain", "native"])
def test_top_p_takes_no_token_more_once_it_is_reached(way: str, native: NativeSampler) -> None:
    logits = torch.full((64, 4), -2.0)
    drawn = (PLAIN if way == "plain" else native).draw(logits, range(64), items(64, top_p=0.5))
    assert set(drawn.tolist()) == {0, 1}


def test_frequencies_follow_the_probabilities(native: NativeSampler) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    tokens = native.draw(probabilities.log().expand(20_000, 4), range(20_000), items(20_000))
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, probabilities, atol=0.012)


def test_the_noise_is_the_same_function(native: NativeSampler) -> None:
    """Two logits differ by the noise's difference and a little more: the choice shows the noise exactly."""
    sequences = items(300)
    seeds = torch.tensor([[item.sampling.seed] for item in sequences])
    noise = gumbel_noise(seeds, torch.tensor([[item.end] for item in sequences]), vocab_size=2)
    for hair, expected in ((2e-5, 1), (-2e-5, 0)):
        logits = torch.stack([torch.zeros(300), noise[:, 0] - noise[:, 1] + hair], dim=1)
        assert native.draw(logits, range(300), sequences).tolist() == [expected] * 300


@pytest.mark.parametrize("vocab_size", [7, 8, 9, 100, 763, 1003, 1024])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_same_logits_are_masked(native: NativeSampler, vocab_size: int, share: float) -> None:
    torch.manual_seed(vocab_size)
    logits, rows = torch.randn(6, vocab_size), [4, 0, 3]
    bits = torch.rand(3, vocab_size) < share
    matchers = [TokenSet(row.nonzero()[:, 0].tolist(), vocab_size=vocab_size) for row in bits]
    masked = [structs.replace(item, matcher=each) for item, each in zip(items(3), matchers, strict=True)]
    expected = logits[rows].masked_fill(~bits, float("-inf"))
    for way in (PLAIN, native):
        assert torch.equal(way.adjust(logits, rows, masked), expected)


some_tokens = st.lists(st.integers(0, 40), max_size=12).map(tuple)
any_adjustment = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.1, 0.3, 10.0]),
        "logit_bias": st.dictionaries(st.integers(0, 40), st.floats(-100, 100)).map(lambda each: tuple(each.items())),
    }
)


@given(
    rows=st.lists(st.tuples(any_adjustment, some_tokens, some_tokens, some_tokens, st.booleans()), min_size=1),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_same_bits_as_one_token_after_the_other(rows: list[tuple[Any, ...]], seed: int) -> None:
    """Sets and counts made anew of all tokens, and every operation on one float32."""
    native = native_sampler()
    logits = torch.randn(len(rows) + 3, 41, generator=torch.Generator().manual_seed(seed)) * 5
    where = list(range(len(rows) + 2, 2, -1))
    given_items, expected = [], logits[where]
    for row, (fields, prompt, generated, banned, has_matcher) in zip(expected, rows, strict=True):
        sampling = SamplingParams(max_tokens=1, **fields)
        adjustments = LogitAdjustments(sampling, prompt)
        for end in range(0, len(generated) + 1, 5):  # some at a time
            adjustments.follow(generated[:end])
        adjustments.follow(generated)
        matcher = TokenSet(range(1, 41, 2), vocab_size=41) if has_matcher else None
        given_items.append(
            structs.replace(
                items(1)[0], sampling=sampling, adjustments=adjustments, banned_token_ids=banned, matcher=matcher
            )
        )
        adjust_plainly(row, given_items[-1], prompt, generated)
    for way in (PLAIN, native):
        assert torch.equal(way.adjust(logits, where, given_items), expected)


def adjust_plainly(
    row: torch.Tensor, item: ScheduledSequence, prompt: tuple[int, ...], generated: tuple[int, ...]
) -> None:
    """In numpy, which takes a tenth of torch's time for a single number."""
    sampling, numbers = item.sampling, row.numpy()
    penalty = np.float32(sampling.repetition_penalty)
    for token in set(prompt) | set(generated):
        numbers[token] = numbers[token] / penalty if numbers[token] > 0 else numbers[token] * penalty
    for token, count in Counter(generated).items():
        numbers[token] += np.float32(-(sampling.presence_penalty + sampling.frequency_penalty * count))
    for token, bias in sampling.logit_bias:
        numbers[token] += np.float32(bias)
    allowed = None if item.matcher is None else item.allowed()
    for token in range(41):
        if token in item.banned_token_ids if allowed is None else not allowed[token >> 3] >> (token & 7) & 1:
            numbers[token] = -np.inf


def test_all_rows_named_or_not_give_the_same(native: NativeSampler) -> None:
    torch.manual_seed(1)
    logits, sequences = torch.randn(9, 100), items(9, frequency_penalty=1.0)
    token_ids = native.draw(logits, range(9), sequences)
    assert token_ids.tolist() == native.draw(logits, list(range(9)), sequences).tolist()
    adjusted = [native.adjust(logits, rows, sequences) for rows in (range(9), list(range(9)))]
    assert torch.equal(*adjusted)
    found = [native.logprobs(logits, rows, token_ids, num_top=3) for rows in (range(9), list(range(9)))]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
