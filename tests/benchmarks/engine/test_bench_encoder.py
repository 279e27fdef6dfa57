from __future__ import annotations

import json

import pytest

from benchmarks.engine import encoder


def test_all_ways_give_the_same_vectors_and_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(encoder._SHAPES, "minilm", tiny)
    assert encoder.main(["--texts", "40", "--longest", "30", "--rounds", "2", "--threads", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["largest_difference"] < 1e-4
    assert figures["padding_padded"] > figures["padding_sorted"] > 0
    assert figures["against_padded"] > 0
    assert figures["against_sorted"] > 0
