from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.service.token_path import main


def test_it_tells_what_a_token_costs(demo_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--streams", "3", "--frames", "5", "--model", str(demo_path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["streams"], line["pause_ms"]) == (3, 0.0)
    assert 0 < line["us_per_token_best"] <= line["us_per_token_p50"] < 100_000
