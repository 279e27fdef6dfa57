"""The results of a batch from its files: in the order of the input, and without parsing what is large."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import from_json

from app.api.endpoints import batch_results
from app.batches import ItemResponse
from app.jobs.job import InvalidItem, Item
from app.jobs.outputs import BatchFormat

HOSTILE = 'a","body":{"x":1}},"error":null}'
ERROR = {"message": "no", "type": "t", "param": None, "code": None}


def line(custom_id: str, status_code: int, body: dict[str, Any]) -> bytes:
    item = Item(number=0, id=custom_id, url="", body={})
    return BatchFormat("batch_1").answered(item, ItemResponse(status_code, body)).line + b"\n"


def merged(custom_ids: list[str], output: bytes, errors: bytes) -> Any:
    sent = b"".join(json.dumps({"custom_id": custom_id}).encode() + b"\n" for custom_id in custom_ids)
    return json.loads(batch_results._merged(sent, output, errors))


def test_results_are_as_the_files_have_them_whatever_texts_are_in_them() -> None:
    body = {"text": HOSTILE, HOSTILE: [1, {"error": None}], "body": {"body": {}}}
    given_up = BatchFormat("batch_1").invalid(InvalidItem(number=0, id="lost", reason="gone")).line + b"\n"
    output = line("one", 200, {"n": 1}) + line(HOSTILE, 200, body)
    results = merged([HOSTILE, "lost", "bad", "one", "none"], output, given_up + line("bad", 400, {"error": ERROR}))
    assert [each["custom_id"] for each in results] == [HOSTILE, "lost", "bad", "one"]
    assert [each["index"] for each in results] == [0, 1, 2, 3]
    assert [each["status_code"] for each in results] == [200, None, 400, 200]
    assert [each["response"] for each in results] == [body, None, None, {"n": 1}]
    assert [each["error"] and each["error"]["message"] for each in results] == [None, "gone", "no", None]
    names = {"index", "custom_id", "status_code", "response", "error", "latency_ms", "tokens_per_second"}
    assert all(each.keys() == names for each in results)


def test_a_large_response_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def counting(text: bytes) -> Any:
        parsed.append(len(text))
        return from_json(text)

    monkeypatch.setattr(batch_results, "from_json", counting)
    body = {"rows": [[1, 2]] * 100_000}
    [result] = merged(["one"], line("one", 200, body), b"")
    assert result["response"] == body
    assert sum(parsed) < 1000
