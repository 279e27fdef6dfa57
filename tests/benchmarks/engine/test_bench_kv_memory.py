from __future__ import annotations

import json

import pytest

from app.model.cpu.library import library
from benchmarks.engine import kv_memory

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def test_both_memories_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_memory.main(["--model", "models/demo", "--sequences", "1", "3", "--length", "40", "--steps", "3"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() >= {"bf16_mib", "int8_mib", "1", "3"}
    # Attention may be 0: its time is that of one thread, and another may have done all of so little.
    assert figures["3"]["step_int8_ms"] > figures["3"]["attention_int8_ms"] >= 0
