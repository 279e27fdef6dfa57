"""Questions that code can answer, and the figures of probabilities."""

from __future__ import annotations

from collections import Counter

from benchmarks.service.decisions import Fact, calibration, facts


def test_half_of_each_kind_are_true_and_the_text_says_so() -> None:
    found = facts(400, seed=3)
    assert Counter((fact.kind, fact.is_true) for fact in found) == {
        (kind, is_true): 100 for kind in ("numbers", "lists") for is_true in (True, False)
    }
    for fact in found:
        words = fact.text.rstrip(".").replace(",", "").split()
        if fact.kind == "numbers":
            first, second = (int(word) for word in words if word.isdigit())
            assert (first > second) == fact.is_true
        else:
            assert (fact.statement.split()[3] in words[2:]) == fact.is_true
    assert found == facts(400, seed=3)


def test_figures_of_probabilities() -> None:
    true, false = (Fact("lists", "", "", is_true) for is_true in (True, False))
    perfect = calibration([(true, 1.0), (false, 0.0)])
    assert (perfect["right"], perfect["brier"], perfect["calibration_error"]) == (1.0, 0.0, 0.0)
    coin = calibration([(true, 0.75), (true, 0.75), (true, 0.75), (false, 0.75), (false, 0.25)])
    assert (coin["right"], coin["brier_of_share"], coin["calibration_error"]) == (0.8, 0.24, 0.05)
    assert coin["bins"] == [[0.25, 0.0, 1], [0.75, 0.75, 4]]
