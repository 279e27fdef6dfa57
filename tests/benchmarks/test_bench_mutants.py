"""Mutants of the core: the draw, the counts, and that the files and their tests exist."""

from __future__ import annotations

from benchmarks.harness.machine import PROJECT
from benchmarks.mutants import TESTS, counted, drawn, in_words


def test_every_file_and_its_tests_exist() -> None:
    named = [path for file, tests in TESTS.items() for path in (file, *tests.split())]
    assert not [path for path in named if not (PROJECT / path).exists()]


def test_a_draw_depends_on_the_seed_and_on_nothing_else() -> None:
    names = [f"x_{number}" for number in range(100)]
    assert drawn(names, 10, 1) == drawn(names[::-1], 10, 1) != drawn(names, 10, 2)
    assert sorted(drawn(names, 1000, 1)) == sorted(names)


def test_what_ends_or_kills_a_mutant_has_noticed_it_and_a_mutant_that_no_test_calls_is_not_noticed() -> None:
    one = counted({"a": "killed", "b": "timeout", "c": "segfault", "d": "survived", "e": "no tests"})
    assert (one["tried"], one["noticed"], one["no tests"]) == (5, 3, 1)
    assert in_words({"a.py": one}).splitlines()[-1].split() == ["|", "a.py", "|", "5", "|", "3", "|", "60%", "|"]
