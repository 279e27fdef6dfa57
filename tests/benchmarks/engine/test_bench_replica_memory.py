from __future__ import annotations

import io
import json
import os
import sys

import pytest
import torch

from app.model.cpu.library import library
from app.model.cpu.shared_weights import _GROWTH, _GrowingFile
from benchmarks.engine import replica_memory

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def test_a_replica_says_when_it_is_loaded_and_what_it_generates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("generate\n"))
    replica_memory.as_replica("models/demo", "bfloat16", "none", "1", "5")
    loaded, generated = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert loaded["load_s"] > 0
    assert len(generated["tokens"]) == 5


def test_the_memory_of_weights_is_told_from_the_rest() -> None:
    own = os.getpid()
    before = replica_memory._weights_pss(own)
    with _GrowingFile("carousel-weights-measured") as file:
        file.allocate(1, dtype=torch.uint8)
        assert replica_memory._weights_pss(own) - before == _GROWTH  # what is mapped at once
        assert replica_memory._pss(own) > _GROWTH
