"""How long a request took, as its answer says, and the ids by which it is found elsewhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from app.config import SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import EngineTimes, FinishReason, Pooling, Request, TokenDelta
from app.engine.trace.entries import Arrival, Entry
from app.engine.trace.recorder import StepRecorder
from app.text import Tokenizer
from tests.kit.engine import build_fake_engine
from tests.kit.service import Answer, Service, last

ASKING = {"x-carousel-timings": "1"}
TIMES = EngineTimes(0.25, 0.5, "continuous-fcfs-00c0ffee")
HEADERS = ("x-carousel-queue-ms", "x-carousel-prefill-ms", "x-carousel-ttft-ms", "x-carousel-decode-ms")


def timed(tokenizer: Tokenizer, times: EngineTimes = TIMES) -> Service:
    """Each request has two tokens, of which the first comes with the times of its engine."""
    return Service(
        tokenizer,
        lambda request: [TokenDelta(request.request_id, (20,), times=times), last(request, (21,), FinishReason.LENGTH)],
    )


def test_an_answer_has_its_times_and_settings_as_headers(tokenizer: Tokenizer) -> None:
    answer = timed(tokenizer).complete()
    assert [answer.headers[name] for name in HEADERS[:2]] == ["250.0", "500.0"]
    assert all(float(answer.headers[name]) >= 0 for name in HEADERS)
    assert answer.headers["x-carousel-settings"] == TIMES.settings
    assert "timings" not in answer.json["usage"], "nothing that was not asked for"


def test_the_wait_for_a_prefix_of_a_tier_is_told_where_there_was_one(tokenizer: Tokenizer) -> None:
    waited = timed(tokenizer, TIMES._replace(fetch_s=0.125))
    assert waited.complete().headers["x-carousel-fetch-ms"] == "125.0"
    assert "x-carousel-fetch-ms" not in timed(tokenizer).complete().headers


def test_a_stream_has_what_is_known_at_its_first_token_and_the_rest_at_its_end(tokenizer: Tokenizer) -> None:
    plain = timed(tokenizer).complete(stream=True)
    assert [name in plain.headers for name in HEADERS] == [True, True, True, False]
    assert all("usage" not in chunk for chunk in plain.chunks)
    body = {"prompt": "Hi", "stream": True}
    chunks = timed(tokenizer).call("POST", "/v1/completions", body, ASKING).chunks
    timings = chunks[-1]["usage"]["timings"]
    assert timings.keys() == {"queue_ms", "prefill_ms", "ttft_ms", "decode_ms"}
    assert (timings["queue_ms"], timings["prefill_ms"]) == (250.0, 500.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_usage_has_the_timings_on_request(tokenizer: Tokenizer, path: str) -> None:
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": ["Hi", "Ho"], "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/responses": {"input": "Hi"},
    }[path]
    answer = timed(tokenizer).call("POST", path, body, ASKING)
    assert answer.status == 200
    assert answer.json["usage"]["timings"]["queue_ms"] == 250.0


class RealEngine:
    """The API over an engine that draws made-up tokens, with its step log."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.entries: list[Entry] = []
        engine = build_fake_engine(recorder=StepRecorder(self._put))
        self.engine = AsyncEngine(engine, max_requests=100)
        self.service = Service(tokenizer, generate=self._generate, pooling=Pooling.LAST)

    def _put(self, entry: Entry) -> bool:
        self.entries.append(entry)
        return True

    async def _generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        prompt = tuple(2 + token_id % 40 for token_id in request.prompt_token_ids)  # of the small vocabulary
        async for delta in self.engine.generate(replace(request, prompt_token_ids=prompt)):
            yield delta

    def call(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        return self.service.call("POST", "/v1/completions", body, headers)

    @property
    def arrived(self) -> list[str]:
        return [entry.request.request_id for entry in self.entries if isinstance(entry, Arrival)]


def test_the_engine_reports_its_times_with_the_first_token(tokenizer: Tokenizer) -> None:
    real = RealEngine(tokenizer)
    answer = real.call({"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}, {})
    real.engine.shutdown()
    assert answer.status == 200
    assert all(name in answer.headers for name in HEADERS)
    assert float(answer.headers["x-carousel-queue-ms"]) <= float(answer.headers["x-carousel-ttft-ms"])
    assert answer.headers["x-carousel-settings"] == real.engine.stats().settings


def test_a_requests_id_finds_its_log_line_and_its_entries_in_the_step_log(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    real, long = RealEngine(tokenizer), "l" * 200
    body = {"prompt": ["Hi", "Ho"], "max_tokens": 2}
    with caplog.at_level(logging.INFO):
        answers = [real.call(body, {"x-request-id": name}) for name in ("mine", "mine", long)]
        own = real.call(body, {})
    real.engine.shutdown()
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine", long]
    for answer, shown in zip([*answers, own], ["mine", "mine", long[:64], own.headers["x-request-id"]], strict=True):
        assert answer.json["id"].startswith(f"cmpl-{shown}-")
        assert [f"{answer.json['id']}-{index}" in real.arrived for index in range(2)] == [True, True]
        assert f"answer {answer.json['id']}" in caplog.text
    assert len({answer.json["id"] for answer in answers}) == 3, "one id sent twice is two requests"


def test_a_request_that_generates_nothing_has_the_times_of_its_prompt(tokenizer: Tokenizer) -> None:
    def only_prompt(request: Request) -> list[TokenDelta]:
        return [TokenDelta(request.request_id, (), FinishReason.LENGTH, times=TIMES)]

    answer = Service(tokenizer, only_prompt).complete(max_tokens=0, echo=True)
    assert [name in answer.headers for name in HEADERS] == [True, True, False, False]


def test_equal_settings_have_equal_versions() -> None:
    versions = {SchedulerConfig().version, SchedulerConfig().version, SchedulerConfig(max_running=8).version}
    assert len(versions) == 2
    assert SchedulerConfig.model_validate({"policy": "sjf"}).version.startswith("mixed-continuous-sjf-")


async def test_the_version_changes_with_the_settings_of_a_running_engine() -> None:
    engine = AsyncEngine(build_fake_engine(), max_requests=10)
    before = engine.stats().settings
    await engine.reconfigure(SchedulerConfig(max_running=3))
    view = await engine.snapshot()
    engine.shutdown()
    assert before != engine.stats().settings == view.settings == SchedulerConfig(max_running=3).version
