"""How fast places become free."""

from __future__ import annotations

import pytest

from app.dispatch import Ends


def test_how_fast_places_become_free_is_seen_from_those_that_did() -> None:
    ends = Ends()
    assert ends.per_s(1.0) == 0
    for n in range(1000):
        ends.note(100 + n / 4)
    assert ends.per_s(350.0) == pytest.approx(4, rel=0.02)
    assert ends.per_s(350.0 + 64) == pytest.approx(2, rel=0.02)  # nothing more has ended
