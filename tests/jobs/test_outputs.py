"""Lines of results: each is one line to every reader."""

from __future__ import annotations

import json

import pytest

from app.batches import ItemResponse
from app.jobs.job import Item, ItemOutput, ItemResult
from app.jobs.outputs import BatchFormat, RecordFormat

LINE_ENDS = "first\u2028second\u2029third\u0085fourth\x1cfifth"


@pytest.mark.parametrize(
    "result",
    [
        BatchFormat("batch").answered(
            Item(number=0, id=LINE_ENDS, url="/v1/completions", body={}, num_bytes=2),
            ItemResponse(200, {"text": LINE_ENDS}),
        ),
        RecordFormat().generated(ItemOutput(number=0, id="a", text=LINE_ENDS)),
    ],
    ids=["batch", "record"],
)
def test_a_text_with_line_ends_is_read_by_lines(result: ItemResult) -> None:
    [line] = result.line.decode().splitlines()
    assert json.dumps(LINE_ENDS) in json.dumps(json.loads(line))
