"""Predicting output lengths."""

from __future__ import annotations

from app.engine.length_predictor import MAX_KINDS, WINDOW, LengthPredictor
from tests.fakes import make_request


def teach(predictor: LengthPredictor, lengths: list[int], *, num_prompt: int = 8, tenant: str = "a") -> None:
    request = make_request((5,) * num_prompt, tenant=tenant, max_tokens=1000)
    for length in lengths:
        predicted = predictor.predict(request, quantile=0.5)
        predictor.learn(request, num_generated=length, num_predicted=1000 if predicted is None else predicted)


def predict(
    predictor: LengthPredictor, *, num_prompt: int = 8, tenant: str = "a", max_tokens: int = 1000
) -> int | None:
    return predictor.predict(make_request((5,) * num_prompt, tenant=tenant, max_tokens=max_tokens), quantile=0.5)


def test_few_outputs_say_nothing() -> None:
    predictor = LengthPredictor()
    assert predict(predictor, max_tokens=77) is None
    teach(predictor, [5, 5, 5])
    assert predict(predictor, max_tokens=77) is None


def test_what_only_its_length_ends_is_as_long_as_that_and_nothing_is_shorter_than_it_must_be() -> None:
    predictor = LengthPredictor()
    teach(predictor, [5] * 10)
    assert predictor.predict(make_request((5,) * 8, tenant="a", max_tokens=99, ignore_eos=True), quantile=0.5) == 99
    assert predictor.predict(make_request((5,) * 8, tenant="a", max_tokens=99, min_tokens=20), quantile=0.5) == 20


def test_the_quantile_of_this_tenant_and_class_counts_up_to_max_tokens() -> None:
    predictor = LengthPredictor()
    teach(predictor, list(range(1, 41)))
    assert predict(predictor) == 21
    request = make_request((5,) * 8, tenant="a", max_tokens=1000)
    assert predictor.predict(request, quantile=0.9) == 37
    assert predict(predictor, max_tokens=12) == 12


def test_prompt_length_classes_and_tenants_are_apart_and_a_new_tenant_is_taken_for_an_average_one() -> None:
    predictor = LengthPredictor()
    teach(predictor, [10] * 8)
    teach(predictor, [200] * 8, num_prompt=100)
    teach(predictor, [30] * 20, tenant="b")
    assert predict(predictor) == 10
    assert predict(predictor, num_prompt=100) == 200
    assert predict(predictor, tenant="b") == 30
    assert predict(predictor, tenant="new") == 30


def test_it_follows_changing_lengths_and_measures_its_error() -> None:
    predictor = LengthPredictor()
    teach(predictor, [10] * 200)
    small = predictor.mean_error_tokens
    assert predict(predictor) == 10
    teach(predictor, [100] * WINDOW)
    assert predict(predictor) == 100
    assert predictor.mean_error_tokens > small + 10


def test_its_memory_is_bounded() -> None:
    predictor = LengthPredictor()
    for number in range(2 * MAX_KINDS):
        teach(predictor, [3], tenant=f"tenant-{number}")
    assert len(predictor._windows) <= MAX_KINDS
    teach(predictor, list(range(1000)))
    assert max(len(window) for window in predictor._windows.values()) == WINDOW
