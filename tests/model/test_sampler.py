from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.batch import ScheduledSequence, StepBatch, StepResult
from app.engine.model_runner import ModelRunner
from app.engine.request import FILTERS, MIN_REPETITION_PENALTY, MIN_TEMPERATURE, MIN_TOP_P, SamplingParams
from app.model.sampler import Sampler, gumbel_noise
from tests.kit.engine import build_fake_engine, make_request, run_to_end
from tests.kit.models import scheduled

VOCAB_SIZE = 40
sample = Sampler().sample


def item(*, position: int = 3, banned: tuple[int, ...] = (), **given: Any) -> ScheduledSequence:
    model_info = {"banned_token_ids": banned}
    return scheduled(1, position - 1, model_info=model_info, **{"vocab_size": VOCAB_SIZE} | given)


def random_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: list[float], num_draws: int = 4000, **sampling: object) -> list[float]:
    """Shares of each token over many positions of one request."""
    rows = torch.tensor([logits]).repeat(num_draws, 1)
    drawn = sample(rows, [item(position=n + 1, seed=7, **sampling) for n in range(num_draws)])
    return [(drawn == token).float().mean().item() for token in range(len(logits))]


def test_only_what_a_matcher_allows_is_taken_and_others_are_left_alone() -> None:
    logits = random_logits(4)
    some = (3, 17, 39)
    free, tied = item(temperature=0.0), item(temperature=0.0, allowed=some)
    drawn = [item(position=n, allowed=some, seed=5) for n in range(60)]
    taken = sample(logits, [free, tied, tied, free], likeliest=logits.argmax(-1)).tolist()
    assert taken[0::3] == logits.argmax(-1)[0::3].tolist()
    assert taken[1:3] == [max((3, 17, 39), key=lambda token: row[token].item()) for row in logits[1:3]]
    assert set(sample(random_logits(60), drawn).tolist()) == {3, 17, 39}


def test_a_ban_holds_unless_it_would_leave_a_matcher_nothing() -> None:
    logits = random_logits(2)
    banned = [item(temperature=0.0, allowed=(3, 17), banned=ban) for ban in ((3, 5), (3, 5, 17))]
    assert sample(logits, banned).tolist() == [17, max((3, 17), key=lambda token: logits[1, token].item())]


@pytest.mark.parametrize("num_rows", [0, 5])
def test_greedy_takes_the_likeliest(num_rows: int) -> None:
    logits = random_logits(num_rows)
    taken = sample(logits, [item(temperature=0.0)] * num_rows)
    assert (taken.dtype, taken.tolist()) == (torch.long, logits.argmax(-1).tolist())


# The ends of the ranges that requests may have: no number of a sampler may become infinite, or vanish.
AT_THE_ENDS: list[dict[str, float]] = [
    {"temperature": MIN_TEMPERATURE},
    {"temperature": MIN_TEMPERATURE, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"temperature": MIN_TEMPERATURE, "repetition_penalty": MIN_REPETITION_PENALTY},
    {"temperature": MIN_TEMPERATURE, "repetition_penalty": 10.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": MIN_TOP_P},
    {"temperature": 2.0, "top_p": MIN_TOP_P, "repetition_penalty": MIN_REPETITION_PENALTY},
]


@pytest.mark.parametrize("sampling", AT_THE_ENDS, ids=str)
def test_the_likeliest_is_drawn_at_the_ends_of_the_ranges(sampling: dict[str, float]) -> None:
    logits = random_logits(9) * 500
    items = [item(position=row + 1, seed=row, prompt=(0, 1, 2), **sampling) for row in range(9)]
    expected = Sampler().adjust(logits, range(9), items).argmax(-1)
    assert sample(logits, items).tolist() == expected.tolist()


def softmax(*logits: float) -> list[float]:
    return torch.tensor(logits).softmax(-1).tolist()


LOGITS = [0.0, 1.0, 2.0, -1.0]
SHARES = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]


@pytest.mark.parametrize(
    ("logits", "sampling", "expected"),
    [
        (LOGITS, {}, softmax(*LOGITS)),
        (LOGITS, {"temperature": 0.5}, softmax(0.0, 2.0, 4.0, -2.0)),
        (LOGITS, {"top_k": 2}, [0.0, *softmax(1.0, 2.0), 0.0]),
        (SHARES, {"top_p": 0.7}, [0.625, 0.375, 0.0, 0.0]),
        (SHARES, {"top_p": 0.01}, [1.0, 0.0, 0.0, 0.0]),
        ([1.0] * 4, {"top_p": 0.5}, [0.5, 0.5, 0.0, 0.0]),  # they reach it
        (SHARES, {"min_p": 0.4}, [0.625, 0.375, 0.0, 0.0]),
        (LOGITS, {"top_n_sigma": 0.9}, [0.0, *softmax(1.0, 2.0), 0.0]),  # their deviation is the root of 1.25
        (LOGITS, {"top_n_sigma": 0.85}, [0.0, 0.0, 1.0, 0.0]),
        (LOGITS, {"top_n_sigma": 0.9, "temperature": 2.0}, [0.0, *softmax(0.5, 1.0), 0.0]),
        ([*LOGITS, -math.inf], {"top_n_sigma": 0.9}, [0.0, *softmax(1.0, 2.0), 0.0, 0.0]),
        ([0.1] * 4, {"top_n_sigma": 0.01}, [0.25] * 4),
        (LOGITS, {"top_n_sigma": 1000.0}, softmax(*LOGITS)),
        (SHARES, {"top_n_sigma": 1.0, "top_p": 0.6}, [1.0, 0.0, 0.0, 0.0]),  # of those left, the first has 0.625
    ],
    ids=str,
)
def test_draws_follow_the_softmax_of_what_filters_leave(
    logits: list[float], sampling: dict[str, float], expected: list[float]
) -> None:
    found = draws(logits, **sampling)
    assert found == pytest.approx(expected, abs=0.025)
    assert [share > 0 for share in found] == [share > 0 for share in expected]


# These are no numbers that a sampler reads for a draw to remove tokens.
NO_FILTERS = """
    max_tokens min_tokens temperature seed presence_penalty frequency_penalty repetition_penalty logit_bias
    stop_token_ids ignore_eos grammar allowed_token_ids bad_words logprobs prompt_logprobs logprob_token_ids
""".split()


def test_a_new_parameter_is_a_filter_of_all_samplers_or_none_on_purpose() -> None:
    assert {*FILTERS, *NO_FILTERS} == {each.name for each in fields(SamplingParams)}
    assert FILTERS.keys().isdisjoint(NO_FILTERS)


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_removes_tokens_but_never_the_likeliest(name: str) -> None:
    logits = random_logits()[0].tolist()
    all_tokens, left = draws(logits, temperature=2.0), draws(logits, temperature=2.0, **{name: FILTERS[name]})
    assert 1 < sum(share > 0 for share in left) < sum(share > 0 for share in all_tokens)
    assert left[max(range(VOCAB_SIZE), key=logits.__getitem__)] > 0


def test_penalties_count_what_they_should() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.1]])
    rows = {"prompt": (0,), "generated": (1, 1, 2), "temperature": 0.0}
    assert sample(logits + torch.tensor([0.0, 0.3, 0.0, 0.0]), [item(frequency_penalty=0.2, **rows)]).item() == 3
    assert sample(logits + torch.tensor([0.0, 0.3, 0.0, 0.0]), [item(presence_penalty=0.1, **rows)]).item() == 1
    # Generated tokens only: the prompt's token 0 is untouched.
    assert sample(logits + torch.tensor([0.2, 0.0, 0.0, 0.0]), [item(presence_penalty=2.0, **rows)]).item() == 0
    # Repetition looks at the prompt too, and makes negative logits more negative.
    assert sample(logits + torch.tensor([0.2, 0.0, 0.0, 0.0]), [item(repetition_penalty=1.2, **rows)]).item() == 3
    for seen, unseen in ((0.5, 0.45), (-1.0, -1.1)):
        assert sample(torch.tensor([[seen, seen, seen, unseen]]), [item(repetition_penalty=1.2, **rows)]).item() == 3


def test_bias_and_bans_change_what_is_drawn() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert sample(logits, [item(temperature=0.0, logit_bias=((2, 5.0),))]).item() == 2
    assert sample(logits, [item(temperature=0.0, logit_bias=((0, -1.5),))]).item() == 1
    assert sample(logits, [item(temperature=0.0, banned=(0, 1))]).item() == 2
    # A ban holds even against a bias.
    assert sample(logits, [item(temperature=0.0, banned=(0,), logit_bias=((0, 100.0),))]).item() == 1


any_filter = {
    each.name: st.sampled_from([each.default, FILTERS[each.name]])
    for each in fields(SamplingParams)
    if each.name in FILTERS
}
any_sampling = st.fixed_dictionaries(
    any_filter
    | {
        "temperature": st.sampled_from([0.0, 0.1, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, VOCAB_SIZE + 5]),
        "top_p": st.sampled_from([0.001, 0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.3, 1.0]),
        "seed": st.sampled_from([0, 1, 2**63 - 1]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 3.0]),
        "logit_bias": st.sampled_from([(), ((3, 2.0), (5, -100.0))]),
    }
)


@settings(deadline=None)  # a busy machine takes longer
@given(rows=st.lists(any_sampling, min_size=1, max_size=6))
def test_a_row_depends_on_that_row_alone(rows: list[dict[str, object]]) -> None:
    items = [item(prompt=(1, 2), generated=(2, 3, 3), position=n + 1, **row) for n, row in enumerate(rows)]
    logits = random_logits(len(rows))
    together = sample(logits, items).tolist()
    assert together == [sample(logits[n : n + 1], [items[n]]).item() for n in range(len(rows))]
    assert all(0 <= token < VOCAB_SIZE for token in together)


class SamplingRunner(ModelRunner):
    """A model that finds all tokens equally likely."""

    def run(self, batch: StepBatch) -> StepResult:
        return StepResult(sample(torch.zeros(len(batch.sampled), VOCAB_SIZE), batch.sampled).tolist())


class Prompt(tuple[int, ...]):
    """Counts the tokens that are read one by one. A slice reads as many as it has, however they are used."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty"])
def test_penalties_do_not_read_the_prompt_again_at_every_step(penalty: str) -> None:
    num_read = []
    for max_tokens in (4, 40):
        prompt = Prompt((5, 6, 7, 8) * 50)
        request = make_request(prompt, max_tokens=max_tokens, ignore_eos=True, **{penalty: 1.5})
        outcome = run_to_end(build_fake_engine(runner=SamplingRunner(), num_blocks=400), request)
        assert len(outcome.token_ids[request.request_id]) == max_tokens
        num_read.append(prompt.num_read)
    assert num_read[0] == num_read[1]


def test_rows_that_ask_for_no_change_are_neither_copied_nor_searched() -> None:
    logits = random_logits(5)
    plain, greedy = item(seed=3), item(temperature=0.0)
    biased = item(temperature=0.0, logit_bias=((3, 50.0),))
    drawn_of, adjusted_rows = [], []

    class Noting(Sampler):
        def draw(self, *given: Any) -> torch.Tensor:
            drawn_of.append((given[0].data_ptr(), list(given[1])))
            return super().draw(*given)

        def adjust(self, *given: Any) -> torch.Tensor:
            adjusted_rows.extend(given[1])
            return super().adjust(*given)

    before, known = logits.clone(), torch.tensor([9, 9, 9, 17, 9])
    tokens = Noting().sample(logits, [plain, biased, plain, greedy, plain], likeliest=known)
    assert tokens[3].item() == 17, "the argmax that is known is not computed again"
    assert (adjusted_rows, drawn_of) == ([1], [(logits.data_ptr(), [0, 2, 4])])
    assert tokens[1].item() == 3
    assert torch.equal(logits, before), "log-probabilities are computed from these later"


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(200, VOCAB_SIZE)
    by_seed = sample(logits, [item(seed=n) for n in range(200)])
    by_position = sample(logits, [item(position=n + 1) for n in range(200)])
    assert len(set(by_seed.tolist())) > 30
    assert len(set(by_position.tolist())) > 30


def test_noise_is_a_fixed_function() -> None:
    """These numbers must never change: a resumed request continues with them on another machine."""
    noise = gumbel_noise(torch.tensor([[12345], [2**63 - 1]]), torch.tensor([[7], [0]]), vocab_size=3)
    assert noise.tolist() == [pytest.approx(row, abs=1e-5) for row in NOISE]


NOISE = [[-0.179236, 1.765218, 0.134604], [3.004328, 0.077042, -0.913252]]


def test_noise_has_the_mean_and_variance_of_a_gumbel() -> None:
    noise = gumbel_noise(torch.arange(50)[:, None], torch.arange(50)[:, None], vocab_size=20_000)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    neighbours = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert abs(neighbours.item()) < 0.01


def test_logits_that_are_not_numbers_still_give_a_token_and_harm_no_other_row() -> None:
    logits = random_logits(2)
    logits[0] = float("nan")
    drawn = sample(logits, [item(top_p=0.5, seed=1), item(top_p=0.5, seed=1)]).tolist()
    assert 0 <= drawn[0] < VOCAB_SIZE
    assert drawn[1] == sample(logits[1:], [item(top_p=0.5, seed=1)]).item()
