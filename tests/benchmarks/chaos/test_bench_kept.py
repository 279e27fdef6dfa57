"""Clients of what is kept get every event once, over connections that break; what comes otherwise is seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from app.text import Tokenizer
from benchmarks.chaos.kept import KeptTraffic, _EventReader, kept
from benchmarks.chaos.traffic import KINDS, mixed
from benchmarks.harness.answer import Answer
from benchmarks.harness.http_call import Target
from tests.api.test_stored_responses import Gated, kept_by
from tests.benchmarks.servers import Cutting, listening
from tests.kit.service import served

NUM_CUTS = 60


def test_a_client_goes_on_until_it_has_every_event_once(demo_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(demo_path))
    text = " ".join(str(number) for number in range(40))
    gate = Gated(tokenizer, text)
    gate.open()
    asked = kept(mixed(3 * len(KINDS), max_tokens=(20, 30)))
    requests = [replace(each, body=each.body | {"model": "demo"}) for each in asked]
    assert Counter(each.name.split()[0] for each in requests) == dict.fromkeys(
        ("responses", "chat/completions", "completions"), len(KINDS)
    )

    async def main() -> KeptTraffic:
        async with served(kept_by(tokenizer, gate), tmp_path) as app, listening(Cutting(app, NUM_CUTS)) as url:
            traffic = KeptTraffic(Target.parse(url), requests, {})
            await traffic.once()
            return traffic

    traffic = asyncio.run(main())
    for answer in traffic.answers:
        assert answer.is_complete, f"{answer.name}: {answer.in_words}"
        assert set(answer.texts.values()) == {text}
    assert traffic.num_breaks == NUM_CUTS
    assert len(gate.requests) == sum(each.body.get("n", 1) for each in requests), "each was computed once"


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 2), (0, 1, 1), (1, 2)])
def test_an_event_that_is_missing_or_comes_twice_is_seen(numbers: tuple[int, ...]) -> None:
    answer = Answer(0.0)
    reader = _EventReader(answer)
    for number in numbers:
        reader.begin()  # each on a connection of its own
        reader.head(200, {})
        reader.body(b'id: cmpl-a:%d\ndata: {"choices": [{"index": 0, "text": "a"}]}\n\n' % number, at_s=1.0)
    assert answer.has_surplus == (numbers != (0, 1, 2))


def test_what_a_refusal_says_is_no_part_of_an_answer_that_has_begun() -> None:
    answer = Answer(0.0)
    reader = _EventReader(answer)
    for status, data in ((200, b'id: cmpl-a:0\ndata: {"choices": []}\n\n'), (503, b'{"error": {}}')):
        reader.begin()
        reader.head(status, {})
        reader.body(data, at_s=1.0)
    assert (answer.status, answer.refusal, answer.error, reader.last_id) == (200, b"", None, "cmpl-a:0")
