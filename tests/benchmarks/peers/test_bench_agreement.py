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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no outputs"),
        ('{"id": "x"}\n', ":1 is no line"),
        ('{"id": "z", "token_ids": []}\n', "other requests"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    reference = write(tmp_path / "a", {"x": [1]})
    (tmp_path / "b").write_text(content)
    assert main([reference, str(tmp_path / "b")]) != 0
    assert message in capsys.readouterr().err
