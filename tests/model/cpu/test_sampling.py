from __future__ import annotations

import pytest
import torch

from app.engine.batch import ScheduledSequence
from app.engine.request import SamplingParams
from app.model.cpu.library import Team, library
from app.model.cpu.sampling import NativeDraw, NativeLogprobs, NativeMask
from app.model.sampler import draw, gumbel_noise, mask

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.2, "top_k": 50},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.01, "top_p": 0.95, "top_k": 40},
]


@pytest.fixture(scope="module")
def native() -> NativeDraw:
    if library() is None:
        pytest.skip("no C++ compiler here")
    return NativeDraw(Team(2))


def items(num_rows: int, *, seed: int = 0, **sampling: float) -> list[ScheduledSequence]:
    return [
        ScheduledSequence(
            request_id="r", token_ids=(0,), start=row, block_ids=[0], samples=True,
            sampling=SamplingParams(max_tokens=1, seed=(row * 7919 + seed) * 2**40 - 5, **sampling),  # type: ignore[arg-type]
        )
        for row in range(num_rows)
    ]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_the_same_tokens_as_the_plain_sampler(native: NativeDraw, filters: dict[str, float], spread: float) -> None:
    """But for logarithms that differ in the last place, and sums at the very edge of top-p."""
    torch.manual_seed(0)
    logits = torch.randn(200, 1003) * spread
    rows = list(range(199, -1, -1))
    sequences = items(200, temperature=0.7, **filters)
    expected, got = (way(logits, rows, sequences) for way in (draw, native))
    assert (expected != got).sum() <= 1
    assert len(set(got.tolist())) > 20


def test_what_is_masked_is_never_drawn_and_ties_go_to_the_first(native: NativeDraw) -> None:
    logits = torch.full((4, 100), float("-inf"))
    logits[:, 37] = -1e30
    assert native(logits, range(4), items(4)).tolist() == [37] * 4
    logits[:, 37:60] = 2.0
    assert set(native(logits, range(4), items(4, top_k=1)).tolist()) == {37}
    assert set(native(logits, range(4), items(4, top_k=3)).tolist()) <= {37, 38, 39}


def test_frequencies_follow_the_probabilities(native: NativeDraw) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    tokens = native(probabilities.log().expand(20_000, 4), range(20_000), items(20_000))
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, probabilities, atol=0.012)


def test_the_noise_is_the_same_function(native: NativeDraw) -> None:
    """Two logits differ by the noise's difference and a little more: the choice shows the noise exactly."""
    sequences = items(300)
    seeds = torch.tensor([[item.sampling.seed] for item in sequences])
    noise = gumbel_noise(seeds, torch.tensor([[item.end] for item in sequences]), vocab_size=2)
    for hair, expected in ((2e-5, 1), (-2e-5, 0)):
        logits = torch.stack([torch.zeros(300), noise[:, 0] - noise[:, 1] + hair], dim=1)
        assert native(logits, range(300), sequences).tolist() == [expected] * 300


@pytest.mark.parametrize("vocab_size", [7, 8, 9, 100, 763, 1003, 1024])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_same_logits_are_masked(native_mask: NativeMask, vocab_size: int, share: float) -> None:
    torch.manual_seed(vocab_size)
    logits, num_bytes = torch.randn(6, vocab_size), -(-vocab_size // 8)
    rows = [4, 0, 3]
    bits = torch.rand(3, 8 * num_bytes) < share
    allowed = bytearray((bits.view(3, -1, 8) * (1 << torch.arange(8))).sum(-1).to(torch.uint8).flatten().tolist())
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~bits[:, :vocab_size], float("-inf"))
    assert torch.equal(mask(logits, rows, allowed), expected)
    assert torch.equal(native_mask(logits, rows, allowed), expected)


@pytest.fixture(scope="module")
def native_mask(native: NativeDraw) -> NativeMask:
    return NativeMask(Team(2))


def test_all_rows_named_or_not_give_the_same(native: NativeDraw) -> None:
    torch.manual_seed(1)
    logits, sequences = torch.randn(9, 100), items(9)
    allowed = bytearray(b"\x5a" * 13 * 9)
    team = Team(2)
    token_ids = native(logits, range(9), sequences)
    assert token_ids.tolist() == native(logits, list(range(9)), sequences).tolist()
    masked = [NativeMask(team)(logits, rows, allowed) for rows in (range(9), list(range(9)))]
    assert torch.equal(*masked)
    found = [NativeLogprobs(team)(logits, rows, token_ids, num_top=3) for rows in (range(9), list(range(9)))]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
