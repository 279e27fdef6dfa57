"""How likely a draft must be, by what steps with and without drafts have taken."""

from __future__ import annotations

from itertools import pairwise

from app.engine.speculation.draft_pace import _MAX_PROBE_EVERY, _PROBE_EVERY, DraftPace


def paced(
    num_sequences: int, *, base_s: float, row_s: float, num_drafts: int, num_kept: int, by_model: bool = False
) -> DraftPace:
    """After steps that take `base_s` and `row_s` for each token."""
    pace = DraftPace(by_model=by_model)
    for _ in range(50):
        pace.note(
            num_sequences=num_sequences, num_drafts=0, num_kept=num_sequences, seconds=base_s + row_s * num_sequences
        )
        seconds = base_s + row_s * (num_sequences + num_drafts)
        pace.note(num_sequences=num_sequences, num_drafts=num_drafts, num_kept=num_kept, seconds=seconds)
    return pace


def test_where_steps_wait_for_memory_unlikely_drafts_are_worthwhile() -> None:
    pace = paced(1, base_s=0.030, row_s=0.0003, num_drafts=4, num_kept=2)
    assert 0.0 < pace.min_acceptance(1) < 0.05


def test_where_steps_are_bound_by_computing_no_draft_is() -> None:
    pace = paced(32, base_s=0.0, row_s=0.002, num_drafts=32, num_kept=40)
    assert pace.min_acceptance(32) >= 1.0


def test_the_gain_of_drafts_that_are_kept_raises_what_a_further_one_must_bring() -> None:
    few = paced(1, base_s=0.010, row_s=0.001, num_drafts=4, num_kept=1)
    many = paced(1, base_s=0.010, row_s=0.001, num_drafts=4, num_kept=5)
    assert few.min_acceptance(1) < many.min_acceptance(1)


def test_from_time_to_time_the_other_kind_of_step_is_measured() -> None:
    drafting = paced(1, base_s=0.030, row_s=0.0003, num_drafts=4, num_kept=2)
    said = [drafting.min_acceptance(1) for _ in range(4 * _PROBE_EVERY)]
    assert sum(each >= 1.0 for each in said) == 4
    plain = paced(32, base_s=0.0, row_s=0.002, num_drafts=32, num_kept=40)
    said = [plain.min_acceptance(32) for _ in range(4 * _PROBE_EVERY)]
    assert sum(each < 1.0 for each in said) == 4


def test_a_step_that_was_held_up_says_little() -> None:
    pace = paced(1, base_s=0.030, row_s=0.0003, num_drafts=4, num_kept=2)
    pace.note(num_sequences=1, num_drafts=4, num_kept=2, seconds=5.0)
    assert pace.min_acceptance(1) < 0.1


def test_steps_that_wait_for_drafts_and_get_none_count_against_drafts() -> None:
    pace = paced(1, base_s=0.010, row_s=0.0, num_drafts=4, num_kept=3)
    assert pace.min_acceptance(1) == 0.0
    for _ in range(50):
        pace.note(num_sequences=1, num_drafts=0, num_kept=1, seconds=0.012, launched_alone=True)
    assert pace.min_acceptance(1) >= 1.0


def test_steps_of_other_sizes_are_learned_apart() -> None:
    pace = paced(32, base_s=0.0, row_s=0.002, num_drafts=32, num_kept=40)
    assert pace.min_acceptance(1) < 1.0


def test_probes_of_a_draft_model_become_rarer_while_they_find_nothing_worthwhile() -> None:
    pace = paced(8, base_s=0.0, row_s=0.002, num_drafts=32, num_kept=40, by_model=True)
    said = [pace.min_acceptance(8, chance=0.4) for _ in range(8 * _MAX_PROBE_EVERY)]
    probes = [step for step, each in enumerate(said) if each < 0.4]
    gaps = [after - before for before, after in pairwise(probes)]
    assert gaps[:4] == [2 * _PROBE_EVERY, 4 * _PROBE_EVERY, 8 * _PROBE_EVERY, 16 * _PROBE_EVERY]
    assert set(gaps[4:]) == {_MAX_PROBE_EVERY}


def test_a_draft_that_is_less_likely_than_worthwhile_is_probed_and_steps_without_are_measured_first() -> None:
    pace = DraftPace(by_model=True)
    assert pace.min_acceptance(1) < 1.0
    for _ in range(4):
        pace.note(num_sequences=1, num_drafts=4, num_kept=1, seconds=0.02)
    assert pace.min_acceptance(1) == 1.0
    for _ in range(4):
        pace.note(num_sequences=1, num_drafts=0, num_kept=1, seconds=0.01)
    said = [pace.min_acceptance(1, chance=0.05) for _ in range(2 * _PROBE_EVERY)]
    assert [each < 0.05 for each in said].count(True) == 1
