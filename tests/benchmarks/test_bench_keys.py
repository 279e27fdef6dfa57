"""The benchmark of many keys, small: accounts, reports and the owner are the service's own."""

from __future__ import annotations

import pytest

from benchmarks.service import keys
from benchmarks.service.keys import LOADS, Exchanges, authentication_figures


@pytest.mark.parametrize("name", LOADS)
def test_keys_without_changes_are_not_told(name: str) -> None:
    num_per_s, every = LOADS[name]
    figures = Exchanges(20, 3, num_per_s, every, seed=1).run()
    if name == "idle":
        assert figures["reported_kb_per_s"] < 0.5
        assert figures["exchanges_per_s"] == pytest.approx(1.0, abs=0.01)
    else:
        assert figures["reported_kb_per_s"] > 0.5
    assert (figures["refused"] > 0.01) == (name == "some refused")


def test_accounts_are_found_by_key_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "NUM_CALLS", 10)
    assert authentication_figures(5).keys() == {"by_key_us", "by_name_us"}
