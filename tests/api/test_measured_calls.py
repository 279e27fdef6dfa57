"""What the API tells the metrics of the calls that it answers."""

from __future__ import annotations

import asyncio

from app.engine.request import FinishReason
from app.errors import Overloaded, StepFailed
from app.text import Tokenizer
from tests.kit.service import WAIT, Service, hang_up, last, say
from tests.metrics.test_exposition import parsed, value


def metrics_of(service: Service) -> bytes:
    answer = service.call("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.body


def test_streamed_and_whole_answers_are_counted_alike(service: Service) -> None:
    usage = service.chat().json["usage"]
    service.chat(stream=True)
    text = metrics_of(service)
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(text, "vllm:generation_tokens_total") == 2 * usage["completion_tokens"]
    assert value(text, "vllm:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert value(text, "vllm:time_to_first_token_seconds_count") == 2
    assert value(text, "vllm:inter_token_latency_seconds_count") == 2 * (usage["completion_tokens"] - 1)
    assert value(text, "carousel_requests_in_flight") == 0


def test_choices_are_requests_of_one_call(service: Service) -> None:
    service.complete(n=3, prompt=["Hi", "Ho"])
    text = metrics_of(service)
    assert value(text, "vllm:request_success_total", finished_reason="stop") == 6
    assert (value(text, "vllm:request_params_n_count"), value(text, "vllm:request_params_n_sum")) == (1, 6)


def test_refusals_are_counted_by_reason_and_model(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [Overloaded("full")], names=("demo", "other"))
    assert service.chat(model="demo").status == 429
    assert service.chat(model="demo", stream=True).status == 429
    assert service.chat(model="other", max_tokens=10_000).status == 400
    assert service.chat(model="unknown").status == 404
    assert service.call("POST", "/v1/completions", b"{").status == 400
    text = metrics_of(service)
    assert value(text, "vllm:admission_rejections_total", model_name="demo", reason="overloaded") == 2
    assert value(text, "vllm:admission_rejections_total", model_name="other", reason="context_too_long") == 1
    assert value(text, "carousel_calls_refused_total", model_name="", reason="not_found") == 1
    assert value(text, "carousel_calls_refused_total", model_name="", reason="invalid_request") == 1


def test_a_stream_that_breaks_off_is_a_failure_and_no_refusal(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20, 21), StepFailed("poison")])
    service.chat(stream=True)
    text = metrics_of(service)
    assert value(text, "carousel_calls_failed_total", reason="step_failed") == 1
    assert value(text, "vllm:request_success_total", finished_reason="error") == 1
    refused = parsed(text)["carousel_calls_refused"].samples
    assert not any(sample.value for sample in refused)
    assert {"overloaded", "unavailable", "step_failed"} < {sample.labels["reason"] for sample in refused}


def test_a_client_that_hangs_up_aborts_and_is_not_in_flight_any_more(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), (21,), WAIT])
    body = {"prompt": "Hi", "stream": True}
    asyncio.run(hang_up(service.app, "/v1/completions", body, lambda: service.generate.open))
    text = metrics_of(service)
    assert value(text, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(text, "carousel_requests_in_flight") == 0


def test_an_answer_cut_by_its_length_says_so(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4", reason=None))
    service.generate.script = lambda request: [(20,), last(request, (21,), FinishReason.LENGTH)]
    service.complete()
    assert value(metrics_of(service), "vllm:request_success_total", finished_reason="length") == 1
