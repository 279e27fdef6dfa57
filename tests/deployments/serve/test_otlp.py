"""Traces over OTLP, read by a receiver in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.batches import ItemOrigin
from app.text import Tokenizer
from deployments.serve.tracing import OtlpTracer, tracer_of_environment
from tests.api.test_request_trace import BODY, resumed
from tests.kit.service import Service
from tests.waiting import PATIENCE_S

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A receiver, and the spans that it has."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("otlp_receiver.py")], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def spans(self) -> list[dict[str, Any]]:
        """All that came; it ends."""
        self.process.terminate()
        return [json.loads(line) for line in self.process.communicate(timeout=PATIENCE_S)[0].splitlines()]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="carousel[tracing] is not installed")
    started = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.endpoint)
    yield started
    started.process.kill()
    started.process.wait()
    assert started.process.stdout is not None
    started.process.stdout.close()


def service(demo_path: Path, tracer: OtlpTracer) -> Service:
    made = Service(Tokenizer.load(str(demo_path)), resumed)
    made.handler.tracer = tracer
    made.app = made.built()
    return made


def test_a_trace_goes_on_from_the_clients(demo_path: Path, collector: Collector) -> None:
    tracer = tracer_of_environment()
    assert isinstance(tracer, OtlpTracer)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    with_parent = service(demo_path, tracer)
    assert with_parent.call("POST", "/v1/completions", BODY, headers).status == 200
    assert with_parent.call("POST", "/v1/completions", {"prompt": 3.5}, {}).status == 400
    unsampled = headers | {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert with_parent.call("POST", "/v1/completions", BODY, unsampled).status == 200
    tracer.close()
    spans = collector.spans()
    [root] = [span for span in spans if span["parent"] == PARENT]
    assert (root["name"], root["trace"], root["service"]) == ("POST /v1/completions", TRACE, "carousel")
    assert root["attributes"]["carousel.request_id"] == "mine"
    assert (root["path"], root["status"]) == ("/v1/traces", 0)
    children = [span for span in spans if span["parent"] == root["id"]]
    names = ["check", "queue", "prefill", "decode", "resumed", "queue", "prefill", "decode", "stream"]
    assert [span["name"] for span in children] == names
    assert {span["trace"] for span in children} == {TRACE}
    assert {span["ns"] for span in children if span["name"] == "prefill"} == {3_000_000}
    [refused] = [span for span in spans if span["status"] == 2]
    assert refused["attributes"]["error.type"] == "InvalidRequest"
    assert len(spans) == 1 + len(names) + 2, "what the client does not sample is not sent"


def test_the_attempts_at_an_item_of_a_batch_are_one_trace(demo_path: Path, collector: Collector) -> None:
    tracer = OtlpTracer()
    handler, item = service(demo_path, tracer).handler, ItemOrigin("batch_1", 7)
    for _ in range(2):  # as after the death of the batches' process
        assert asyncio.run(handler.handle_item("", "/v1/completions", {"prompt": "Hi"}, item)).status_code == 200
    tracer.close()
    spans = collector.spans()
    roots = [span for span in spans if not span["parent"]]
    assert [root["name"] for root in roots] == ["item /v1/completions"] * 2
    assert {root["attributes"]["carousel.request_id"] for root in roots} == {"batch_1-7"}
    assert {root["attributes"]["carousel.batch_id"] for root in roots} == {"batch_1"}
    assert {span["trace"] for span in spans} == {hashlib.sha256(b"batch_1-7").hexdigest()[:32]}
    for root in roots:
        assert sum(span["parent"] == root["id"] and span["name"] == "resumed" for span in spans) == 1


def test_without_a_collector_there_is_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_of_environment() is None


def test_a_protocol_without_exporter_is_a_warning_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with caplog.at_level(logging.WARNING):
        assert tracer_of_environment() is None
    assert "carousel[tracing]" in caplog.text


def test_a_collector_that_is_not_there_harms_no_request(demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="carousel[tracing] is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracer = OtlpTracer()
    try:
        assert service(demo_path, tracer).call("POST", "/v1/completions", BODY, {}).status == 200
    finally:
        tracer.close()
