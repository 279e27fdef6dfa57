from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers.agreement import main


def write(path: Path, outputs: dict[str, list[int]]) -> str:
    path.write_text("".join(json.dumps({"id": name, "token_ids": ids}) + "\n" for name, ids in outputs.items()))
    return str(path)


def test_equal_requests_and_the_length_of_agreement_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write(tmp_path / "a", {"x": [1, 2, 3, 4], "y": [5, 6]})
    other = write(tmp_path / "b", {"y": [5, 6], "x": [1, 2, 9, 4]})
    assert main([reference, other, reference]) == 0
    differing, same = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (differing["num_equal"], differing["share_before_first_difference"]) == (1, 0.75)
    assert (same["num_equal"], same["share_before_first_difference"]) == (2, 1.0)
