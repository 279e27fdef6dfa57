from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from app.engine.batch import ScheduledSequence
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.request import FILTERS as COMMON
from app.model.logprobs import compute_logprobs
from app.model.sampler import Sampler, gumbel_noise
from tests.kit.models import DEVICE, scheduled
from tests.model.test_sampler import AT_THE_ENDS, any_filter

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.sampler import ROW_LAYOUT, DeviceEntries, TritonSampler

sample = Sampler().sample
VOCAB_SIZE = 45
TILE = 32  # so that a row has two
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def item(*, position: int = 3, banned: tuple[int, ...] = (), **given: Any) -> ScheduledSequence:
    model_info = {"banned_token_ids": banned}
    return scheduled(1, position - 1, model_info=model_info, **{"vocab_size": VOCAB_SIZE, "prompt": (1, 2, 2)} | given)


def triton() -> TritonSampler:
    return TritonSampler(DEVICE, tile=TILE)


any_filters = st.fixed_dictionaries(
    any_filter
    | {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 7, VOCAB_SIZE, VOCAB_SIZE + 5]),
        "top_p": st.sampled_from([1e-6, 0.2, 0.5, 0.9, 1.0, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "seed": st.sampled_from([0, 1, 2**63 - 1]),
        "banned": st.sampled_from([(), (), (3, 44)]),
        "allowed": st.sampled_from([(), (), (3, 17, 39, 44)]),
    }
)
with_changes = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 2.0]),
        "logit_bias": st.sampled_from([(), ((3, 0.5), (17, -0.25))]),
        "generated": st.sampled_from([(), (3, 5, 5, 40)]),
    }
)
# Few different values: most tokens have equals.
some_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


# Without shrinking: a row takes the interpreter some 50 ms.
@settings(deadline=None, max_examples=18, derandomize=True, phases=[Phase.generate])
@given(
    rows=st.lists(st.tuples(some_logits, st.builds(dict.__or__, any_filters, with_changes)), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
)
def test_the_same_tokens_as_the_plain_sampler_alone_and_in_any_batch(
    rows: list[tuple[list[float], dict[str, Any]]], dtype: torch.dtype
) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=dtype, device=DEVICE)
    items = [item(position=n + 1, **filters) for n, (_, filters) in enumerate(rows)]
    together = triton().sample(logits, items).tolist()
    if len(rows) > 1:
        assert together == [triton().sample(logits[n : n + 1], [each]).item() for n, each in enumerate(items)]
    # Where sums of weights reach top-p exactly, rounding decides.
    plain = [
        sample(logits, [_with_shares(each, factor) for each in items]).tolist() for factor in (1, 1.00001, 0.99999)
    ]
    assert all(token in expected for token, *expected in zip(together, *plain, strict=True))


def _with_shares(item: ScheduledSequence, factor: float) -> ScheduledSequence:
    """The filters of shares, and of other fractions, a little looser or tighter."""
    shares = {name: getattr(item.sampling, name) for name, value in COMMON.items() if isinstance(value, float)}
    shares = {
        name: value if value == 1.0 else value / factor if name == "min_p" else value * factor
        for name, value in shares.items()
    }
    return structs.replace(item, sampling=replace(item.sampling, **shares))


ALL_FILTERS = {**COMMON, "min_p": 0.01, "top_p": 0.95, "top_k": 40}
FILTERS = [
    {}, *({name: value} for name, value in COMMON.items()), {"top_k": 1}, {"top_p": 0.2, "top_k": 50}, {"top_p": 1e-6},
]  # fmt: skip


@pytest.mark.parametrize(
    ("filters", "dtype"),
    # Each with numbers of one type, all together with those of each.
    [*zip(FILTERS, cycle(TYPES), strict=False), *((ALL_FILTERS, dtype) for dtype in TYPES)],
    ids=str,
)
def test_the_same_tokens_of_other_numbers(filters: dict[str, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(3, 203, device=DEVICE) * torch.tensor([[0.3], [3.0], [30.0]], device=DEVICE)).to(dtype)
    items = [item(position=n, temperature=0.7, seed=n * 7919, **filters) for n in range(1, 4)]
    assert TritonSampler(DEVICE, tile=128).sample(logits, items).tolist() == sample(logits, items).tolist()


@pytest.mark.parametrize("sampling", AT_THE_ENDS, ids=str)
def test_the_same_tokens_at_the_ends_of_the_ranges(sampling: dict[str, float]) -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 1000
    items = [item(seed=row, **sampling) for row in range(2)]
    assert triton().sample(logits, items).tolist() == sample(logits, items).tolist()


def test_the_noise_is_the_same_function() -> None:
    seeds, positions = torch.arange(3, 9)[:, None] * 2**58, torch.arange(6)[:, None] * 1000
    noise = gumbel_noise(seeds, positions, vocab_size=2)
    # Two logits differ by the noise's difference and a little more: the choice shows the noise exactly.
    for hair, expected in ((1e-5, 1), (-1e-5, 0)):
        logits = torch.stack([torch.zeros(6), noise[:, 0] - noise[:, 1] + hair], dim=1).to(DEVICE)
        items = [
            item(seed=seed, position=at) for (seed,), (at,) in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        assert triton().sample(logits, items).tolist() == [expected] * 6


def test_logits_that_are_not_numbers_still_give_a_token_and_harm_no_other_row() -> None:
    logits = torch.randn(4, VOCAB_SIZE, device=DEVICE)
    logits[0], logits[1], logits[2, :5] = float("nan"), float("-inf"), float("nan")
    for filters in (*({name: value} for name, value in COMMON.items()), {}, {"temperature": 0.0}):
        items = [item(seed=1, **filters)] * 4
        drawn = triton().sample(logits, items).tolist()
        assert all(0 <= token < VOCAB_SIZE for token in drawn)
        assert drawn[3] == sample(logits[3:], items[:1]).item()


def test_equal_negative_logits_at_the_edge_of_top_p_are_counted_by_their_weight() -> None:
    logits = torch.full((8, 4), -2.0, dtype=torch.bfloat16, device=DEVICE)
    for top_p in (0.499, 0.5):
        items = [item(top_p=top_p, position=n) for n in range(1, 9)]
        assert set(triton().sample(logits, items).tolist()) == {0, 1}


def test_minus_zero_is_zero() -> None:
    logits = torch.full((1, VOCAB_SIZE), -1.0, device=DEVICE)
    logits[0, 7], logits[0, 9] = -0.0, 0.0
    assert triton().sample(logits, [item(top_k=1)]).item() == 7


some_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12).map(tuple)
any_changes = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.1, 0.3, 10.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100)).map(
            lambda each: tuple(each.items())
        ),
        "allowed": st.sampled_from([(), (3, 17, 39, 44)]),
        "banned": some_tokens.map(lambda tokens: tuple(set(tokens))),
    }
)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="reads what the kernel writes down for itself")
@settings(deadline=None, max_examples=12, derandomize=True, phases=[Phase.generate])
@given(
    rows=st.lists(st.tuples(any_changes, some_tokens, some_tokens), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
)
def test_changed_logits_are_those_of_a_cpu_bit_for_bit_while_tokens_are_added(
    rows: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]], dtype: torch.dtype
) -> None:
    logits = (torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(len(rows))) * 5).to(dtype)
    ours, scratches = triton(), []

    def noting(items: Any, scratch: torch.Tensor) -> torch.Tensor:
        scratches.append(scratch)
        return TritonSampler._facts_of(ours, items, scratch)

    items = [item(prompt=prompt, temperature=0.0, **fields) for fields, prompt, _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model.cuda.sampler._FEWEST_ENTRIES", 4)
        patch.setattr(ours, "_facts_of", noting)
        for end in (0, 5, 13):
            for each, (_, _, generated) in zip(items, rows, strict=True):
                if each.adjustments is not None:
                    each.adjustments.follow(generated[:end])
            ours.sample(logits, items)
    places = [
        at
        for at, each in enumerate(items)
        if each.adjustments is not None or (each.banned_token_ids and each.matcher is None)
    ]
    assert len(scratches[-1]) == len(places)
    num_words = -(-VOCAB_SIZE // 32)
    for scratch, at in zip(scratches[-1], places, strict=True):
        banned = () if items[at].matcher is not None else items[at].banned_token_ids
        of_row = structs.replace(items[at], matcher=None, banned_token_ids=banned)
        bits = np.unpackbits(scratch[:num_words].numpy().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        found = torch.where(torch.from_numpy(bits) != 0, scratch[num_words:].view(torch.float32), logits[at].float())
        assert torch.equal(found, Sampler().adjust(logits[at : at + 1], [0], [of_row])[0])


def test_a_step_brings_only_new_tokens_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    changes = DeviceEntries.changes

    def noting(self: DeviceEntries, own: LogitAdjustments) -> bytes:
        sent.append(changes(self, own))
        return sent[-1]

    monkeypatch.setattr(DeviceEntries, "changes", noting)
    ours, logits = triton(), torch.randn(1, VOCAB_SIZE, device=DEVICE)
    each = item(repetition_penalty=1.5, frequency_penalty=0.5, prompt=tuple(range(30)), logit_bias=((40, 1.0),))
    assert each.adjustments is not None
    for generated in ((), (), (5,), (5, 41), (5, 41, 41, 2)):
        each.adjustments.follow(generated)
        ours.sample(logits, [each])
    assert [len(part) // 20 for part in sent] == [31, 0, 1, 1, 2]


def test_rows_of_one_sequence_with_drafts_each_bring_what_changes() -> None:
    """A GPU draws them in any order."""
    each = item(logit_bias=((40, 1.0), (3, -1.0)))
    facts = triton()._facts_of([each, each], torch.empty(2, 2 + VOCAB_SIZE, dtype=torch.int32, device=DEVICE))
    rows = facts[: 2 * ROW_LAYOUT.size].view(2, ROW_LAYOUT.size)
    assert rows[:, ROW_LAYOUT.num_changes].tolist() == [2, 2]
    assert len(set(rows[:, ROW_LAYOUT.changes].tolist())) == 1


def test_each_parameter_of_a_draw_has_its_place_in_a_row() -> None:
    each = item(seed=2**63 - 1, temperature=0.25, position=7, **COMMON)
    facts = triton()._facts_of([each], torch.empty(0, 2 + VOCAB_SIZE, dtype=torch.int32, device=DEVICE)).cpu()
    for name in ("seed", "temperature", *COMMON):
        value = getattr(each.sampling, name)
        row = facts.view(torch.float32) if isinstance(value, float) else facts
        assert row[getattr(ROW_LAYOUT, name)].item() == pytest.approx(value), name
    assert facts[ROW_LAYOUT.position].item() == 7
    assert len(facts) == ROW_LAYOUT.size


def test_entries_go_with_their_sequence_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, logits = triton(), torch.randn(2, VOCAB_SIZE, device=DEVICE)
    items = [item(repetition_penalty=1.5, prompt=(n, 7), temperature=0.0) for n in range(2)]
    expected = ours.sample(logits, items).tolist()
    assert len(ours._entries) == 2
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_kernels", None)
        with pytest.raises(AttributeError):
            ours.sample(logits, items)
    assert ours.sample(logits, items).tolist() == expected
    del items[0]
    gc.collect()
    assert len(ours._entries) == 1


@pytest.mark.parametrize(
    ("spread", "num_top", "dtype"),
    [
        *((0.5, num_top, dtype) for num_top, dtype in zip((0, 1, 20), TYPES, strict=True)),
        *((30.0, 20, dtype) for dtype in TYPES),
        (30.0, 1, torch.float32),
    ],
)
def test_log_probabilities_are_those_of_torch(spread: float, num_top: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, 203, device=DEVICE) * spread).to(dtype)
    logits[1, 7:] = float("-inf")
    rows, tokens = [4, 1, 0], torch.tensor([3, 5, 202], device=DEVICE)
    found = TritonSampler(DEVICE, tile=128).logprobs(logits, rows, tokens, num_top=num_top)
    plain = compute_logprobs(logits, rows, tokens, num_top=num_top)
    torch.testing.assert_close(found.logprobs, plain.logprobs, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.top_logprobs, plain.top_logprobs, atol=1e-5, rtol=1e-6)
    assert torch.equal(found.ranks, plain.ranks)
    # Of equal ones the lower token goes first.
    expected = logits[rows].float().sort(descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(found.top_token_ids, expected)


def test_log_probabilities_without_numbers_harm_no_other_row() -> None:
    logits = torch.zeros(3, VOCAB_SIZE, device=DEVICE)
    logits[0], logits[1, 4] = float("nan"), float("nan")
    tokens = torch.tensor([2, 2, 2], device=DEVICE)
    found = triton().logprobs(logits, range(3), tokens, num_top=2)
    assert found.logprobs.tolist() == [-math.inf, pytest.approx(-math.log(44)), pytest.approx(-math.log(45))]
    assert found.top_token_ids.tolist() == [[0, 1]] * 3
    assert found.logprobs[1:].tolist() == found.top_logprobs[1:, 0].tolist()
