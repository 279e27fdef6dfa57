"""POST /v1/batch: a list of prompts, answered at once or as a job, and what comes of each of them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.api import build_app
from app.api.prepared_request import RequestLimits
from app.batches import BatchLimits
from app.config import WebhooksConfig
from app.errors import Overloaded, StepFailed
from app.text import Tokenizer
from tests.api.test_large_bodies import CountingTokenizer
from tests.kit.jobs import Echo, service_in
from tests.kit.service import (
    KEY,
    OTHER_KEY,
    WAIT,
    Connection,
    Service,
    bearer,
    begun_batch,
    client_of,
    entry,
    hang_up,
    http_client,
    job_ended,
    line_of,
    say,
    sent_batch,
    served,
)
from tests.stalls import slowness, stalls_of_loop
from tests.waiting import until
from tests.webhooks.receivers import LOCAL, SECRET, Receiver

JOB = {"async": True}


async def post(client: httpx.AsyncClient, prompts: list[Any], **fields: Any) -> httpx.Response:
    return await client.post("/v1/batch", json={"prompts": prompts, **fields})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def echoing(tokenizer: Tokenizer) -> Service:
    """A model that says its prompt again."""
    return Service(tokenizer, lambda request: say(tokenizer, tokenizer.decode(request.prompt_token_ids))(request))


def texts(results: list[dict[str, Any]]) -> list[str]:
    return [each["response"]["choices"][0].get("text") for each in results]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_holds_no_body_once_its_prompts_are_prepared(
    tokenizer: Tokenizer, tmp_path: Path, stream: bool
) -> None:
    service, mark = Service(tokenizer, lambda request: [WAIT]), "a text of this test alone"
    account = service.handler.authenticator.accounts[0]
    body = {"prompts": ["Hi", "Ho"], "stream": stream, "unknown": [mark]}
    async with service_in(tmp_path, Echo()) as batches:
        app = build_app(service.handler, service._is_ready, batches=batches)
        async with Connection(app, "POST", "/v1/batch", [json.dumps(body).encode()], {}) as client:
            await until(lambda: len(service.generate.open) == 2)
            await until(lambda: not account.pools.body_bytes.held(account))
            lists = [each for each in gc.get_objects() if type(each) is list and len(each) == 1]
            firsts = [first for each in lists for first in each[:1]]  # another thread may have emptied it by now
            assert sum(isinstance(first, str) and first == mark for first in firsts) == 1, "the test's own"
            client.hang_up()


async def test_a_prediction_that_prompts_have_in_common_is_encoded_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = echoing(tokenizer)
    async with http_client(service, tmp_path) as client:
        prediction = {"type": "content", "content": "one two three"}
        assert (await post(client, [chat("Hi"), chat("Ho")], prediction=prediction)).status_code == 200
    first, second = (request.prediction_token_ids for request in service.generate.requests)
    assert first is second
    assert first == tokenizer.encode("one two three", add_special_tokens=False)


@pytest.mark.parametrize("mode", [{}, JOB], ids=["at once", "as a job"])
async def test_texts_are_answered_in_their_order(tokenizer: Tokenizer, tmp_path: Path, mode: dict[str, Any]) -> None:
    prompts = [f"{n} + {n}" for n in range(12)]
    async with http_client(echoing(tokenizer), tmp_path) as client:
        answer = (await post(client, prompts, max_tokens=20, **mode)).json()
        if mode:
            assert (answer["status"], answer["results"], answer["progress"]) == ("validating", None, 0)
            answer = await job_ended(client, answer["id"])
        assert (answer["object"], answer["status"], answer["progress"]) == ("batch", "completed", 1)
        assert answer["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert texts(answer["results"]) == prompts
        assert [each["index"] for each in answer["results"]] == list(range(12))
        assert all(each["error"] is None and each["status_code"] == 200 for each in answer["results"])
        used = [each["response"]["usage"] for each in answer["results"]]
        assert answer["usage"]["input_tokens"] == sum(usage["prompt_tokens"] for usage in used)
        assert answer["usage"]["output_tokens"] == sum(usage["completion_tokens"] for usage in used)


async def test_each_entry_and_the_whole_say_how_long_they_took(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with http_client(echoing(tokenizer), tmp_path) as client:
        answer = (await post(client, ["3", "4 5"], max_tokens=20)).json()
        for entry_, num_tokens in [
            *((each, each["response"]["usage"]["completion_tokens"]) for each in answer["results"]),
            (answer, answer["usage"]["output_tokens"]),
        ]:
            assert entry_["latency_ms"] > 0
            assert entry_["tokens_per_second"] == pytest.approx(1000 * num_tokens / entry_["latency_ms"], rel=0.2)
        assert answer["latency_ms"] >= max(each["latency_ms"] for each in answer["results"])


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"async": True}])
async def test_the_answer_names_the_fields_that_had_no_effect(
    tokenizer: Tokenizer, tmp_path: Path, mode: dict[str, Any]
) -> None:
    async with http_client(echoing(tokenizer), tmp_path) as client:
        answer = await post(client, ["3"], provider={"order": ["x"]}, **mode)
        assert (answer.status_code, answer.headers["x-carousel-ignored"]) == (200, "provider")


async def test_a_streamed_list_has_an_event_for_each_entry_as_it_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prompts = ["4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4", "3", "long " * 500]
    async with http_client(echoing(tokenizer), tmp_path) as client:
        answer = await post(client, prompts, max_tokens=60, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        *entries, whole = [json.loads(event.removeprefix("data: ")) for event in events]
        refused = next(each for each in entries if each["index"] == 2)
        assert (refused["status_code"], refused["error"]["code"]) == (400, "context_length_exceeded")
        entries.remove(refused)
        assert [each["index"] for each in entries] == [1, 0], "as they end"
        assert texts(entries) == ["3", prompts[0]]
        assert (whole["object"], whole["results"]) == ("batch", None)
        assert whole["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert whole["usage"]["output_tokens"] == sum(
            each["response"]["usage"]["completion_tokens"] for each in entries
        )


@pytest.mark.parametrize("mode", [{}, JOB], ids=["at once", "as a job"])
async def test_a_bad_prompt_fails_alone_with_the_error_that_it_would_have_had(
    service: Service, tmp_path: Path, mode: dict[str, Any]
) -> None:
    prompts = [chat("Hi"), [{"role": "king", "content": "Hi"}], chat("long " * 500), [], chat("Ho")]
    async with http_client(service, tmp_path) as client:
        answer = (await post(client, prompts, model="demo", max_tokens=8, **mode)).json()
        if mode:
            answer = await job_ended(client, answer["id"])
        assert answer["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
        results = answer["results"]
        assert [each["status_code"] for each in results] == [200, 400, 400, 400, 200]
        assert results[0]["response"]["choices"][0]["message"]["content"] == "3 4 5."
        assert [each["error"]["param"] for each in results[1:4]] == ["messages[0].role", "messages", "messages"]
        assert results[2]["error"]["code"] == "context_length_exceeded"
        assert all(each["response"] is None for each in results[1:4])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "Hi"}, "prompts"),
        ({"prompts": ["Hi", chat("Hi")]}, "prompts"),
        ({"prompts": ["Hi", 5]}, "prompts"),
        ({"prompts": ["Hi"] * 10_001, "async": True}, "prompts"),
        ({"prompts": ["Hi"] * 17}, "prompts"),
        ({"prompts": ["Hi"] * 9, "n": 2}, "prompts"),
        ({"prompts": ["Hi"] * 9, "best_of": 2}, "prompts"),
        ({"prompts": ["Hi"], "prompt": "Ho"}, "prompt"),
        ({"prompts": ["Hi"], "messages": chat("Ho")}, "messages"),
        ({"prompts": ["Hi"], "stream": True, "async": True}, "stream"),
        ({"prompts": ["Hi"], "temperature": 9}, "temperature"),
        ({"prompts": ["Hi"], "max_tokens": "many"}, "max_tokens"),
        ({"prompts": ["Hi"], "model": "huge"}, "model"),
        ({"prompts": ["Hi"], "async": "yes"}, "async"),
        ({"prompts": ["Hi"], "async": True, "deadline_s": 5}, "deadline_s"),
        ({"prompts": ["Hi"], "async": True, "metadata": {"k": 1}}, "metadata.k"),
        ({"prompts": ["Hi"], "async": True, "webhook": {"url": "https://a.example"}}, "webhook.secret"),
        ({"prompts": ["Hi"], "metadata": {"k": "v"}}, "metadata"),
        ({"prompts": ["Hi"], "webhook": {"url": "https://a.example", "secret": SECRET}}, "webhook"),
        ({"prompts": ["Hi"], "n": 17, "async": True}, "n"),
        ({"prompts": ["Hi"], "stop": ["x" * 300]}, "stop"),
        ({"prompts": ["Hi"], "max_tokens": 200}, "max_tokens"),
        ({"prompts": ["Hi"], "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompts": ["Hi"], "documents": ["3 " * 5_000]}, "prompt"),
        ({"prompts": [chat("Hi")], "documents": ["3 " * 5_000]}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_mistake_of_all_prompts_is_one_error_and_nothing_is_begun(
    service: Service, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with http_client(service, tmp_path, limits=RequestLimits(max_prompts=16)) as client:
        response = await client.post("/v1/batch", json=fields)
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["param"] == param
        assert service.generate.requests == []
        assert (await client.get("/v1/batches")).json()["data"] == (await client.get("/v1/files")).json()["data"] == []


async def test_when_no_replica_has_room_for_any_of_them_the_call_is_refused_as_others_are(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    service = Service(tokenizer, lambda request: [Overloaded("all are full", retry_after_s=7)])
    async with http_client(service, tmp_path) as client:
        refused = await post(client, ["Hi", "Ho"])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert refused.json()["error"]["code"] == "overloaded"


async def test_one_that_no_replica_has_room_for_is_an_error_of_its_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    full, broken = (tuple(tokenizer.encode(text, add_special_tokens=True)) for text in ("1", "2"))
    failures = {full: Overloaded("all are full", retry_after_s=7), broken: StepFailed("the step raised")}
    three = say(tokenizer, "3")
    service = Service(
        tokenizer,
        lambda request: (
            [failures[request.prompt_token_ids]] if request.prompt_token_ids in failures else three(request)
        ),
    )
    async with http_client(service, tmp_path) as client:
        answer = await post(client, ["1", "2", "4"])
        assert answer.status_code == 200
        results = answer.json()["results"]
        assert [each["status_code"] for each in results] == [429, 500, 200]
        assert results[0]["error"]["code"] == "overloaded"
        assert "the step raised" not in results[1]["error"]["message"]


async def test_a_disconnect_ends_all_prompts_of_the_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, lambda request: [WAIT])
    async with served(service, tmp_path) as app:
        await hang_up(app, "/v1/batch", {"prompts": ["Hi"] * 5}, lambda: len(service.generate.open) == 5)
        assert service.generate.open == set()


async def test_what_is_answered_at_once_counts_for_the_key_and_runs_in_its_name(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4 5."))
    keys = [entry(tokens_per_minute=6_000, max_tokens=40)]
    async with http_client(service, tmp_path, keys=keys) as client:
        client.headers.update(bearer())
        answer = await post(client, ["Hi", "Ho"], max_tokens=40, user="somebody else")
        assert {request.tenant for request in service.generate.requests} == {"alice"}
        used = answer.json()["usage"]["total_tokens"]
        left = int((await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"])
        assert 6_000 - used <= left < 6_000 - used + 50, "it fills again meanwhile"
        for param, beyond in (("max_tokens", 41), ("priority", -1)):
            refused = await post(client, ["Hi"], **{param: beyond})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_key_sees_only_its_own_jobs_and_uses_only_its_models(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("small", "large"))
    keys = [entry(models=["small"]), entry(OTHER_KEY, "bob")]
    async with http_client(service, tmp_path, keys=keys) as client:
        assert (await client.get("/v1/batch/stats")).status_code == 401
        client.headers.update(bearer(KEY))
        for mode in ({}, JOB):
            refused = await post(client, ["Hi"], model="large", **mode)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        job = (await post(client, ["Hi"], model="small", **JOB)).json()
        await job_ended(client, job["id"])
        others = await client.get(f"/v1/batch/{job['id']}", headers=bearer(OTHER_KEY))
        assert (others.status_code, others.json()["error"]["code"]) == (404, "batch_not_found")
        stats = [(await client.get("/v1/batch/stats", headers=bearer(key))).json() for key in (KEY, OTHER_KEY)]
        assert [each["requests"]["completed"] for each in stats] == [1, 0]


async def test_stats_say_what_waits_runs_and_is_done(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, lambda request: [WAIT])
    async with http_client(service, tmp_path, max_in_flight=2) as client:
        job = (await post(client, ["Hi"] * 5, **JOB)).json()
        await until(lambda: len(service.generate.open) == 2)
        stats = (await client.get("/v1/batch/stats")).json()
        assert stats["object"] == "batch.stats"
        assert stats["batches"]["in_progress"] == 1
        assert stats["requests"] == {"queued": 3, "running": 2, "completed": 0, "failed": 0}
        await client.post(f"/v1/batches/{job['id']}/cancel")
        assert (await job_ended(client, job["id"]))["status"] == "cancelled"

        service.generate.script = say(tokenizer, "3 4 5.")
        await job_ended(client, (await post(client, ["Hi"] * 5, **JOB)).json()["id"])
        stats = (await client.get("/v1/batch/stats")).json()
        assert stats["batches"] == dict.fromkeys(stats["batches"], 0) | {"cancelled": 1, "completed": 1}
        assert stats["requests"] == {"queued": 0, "running": 0, "completed": 5, "failed": 0}
        assert stats["tokens"]["output"] == 25
        assert 0 < stats["output_tokens_per_second"] <= 25


async def test_a_cancelled_job_says_which_prompts_were_not_done(tokenizer: Tokenizer, tmp_path: Path) -> None:
    three, waits = say(tokenizer, "3"), tuple(tokenizer.encode("2", add_special_tokens=True))
    service = Service(tokenizer, lambda request: [WAIT] if request.prompt_token_ids == waits else three(request))
    async with http_client(service, tmp_path) as client:
        job = (await post(client, ["1", "2", "4"], **JOB)).json()
        shown = await until(
            lambda: client.get(f"/v1/batch/{job['id']}"), lambda shown: shown.json()["request_counts"]["completed"] >= 2
        )
        job = shown.json()
        assert (job["status"], job["results"], round(job["progress"], 2)) == ("in_progress", None, 0.67)
        await client.post(f"/v1/batches/{job['id']}/cancel")
        results = (await job_ended(client, job["id"]))["results"]
        assert [each["status_code"] for each in results] == [200, None, 200]
        assert results[1]["error"]["code"] == "batch_cancelled"


async def test_a_job_is_a_batch_and_a_batch_can_be_read_as_a_job(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        job = (await post(client, ["Hi", "Ho"], metadata={"night": "first"}, **JOB)).json()
        job = await job_ended(client, job["id"])
        batch = (await client.get(f"/v1/batches/{job['id']}")).json()
        assert batch.items() <= job.items()
        assert batch["metadata"] == {"night": "first"}
        sent = (await client.get(f"/v1/files/{batch['input_file_id']}/content")).content.splitlines()
        assert [json.loads(line)["custom_id"] for line in sent] == ["0", "1"]

        lines = [json.loads(line_of(name, prompt=name)) for name in ("zoe", "adam", "7")]
        odd = [json.dumps(line, indent=1).replace("\n", "\r").encode() for line in lines]
        content = b"\xef\xbb\xbf" + b"\n\n".join(odd)
        other = await job_ended(client, await begun_batch(client, content))
        assert [each["custom_id"] for each in other["results"]] == ["zoe", "adam", "7"]


async def test_a_job_whose_files_are_gone_or_too_large_to_show_has_no_results(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http_client(service, tmp_path) as client:
        job = await job_ended(client, (await post(client, ["Hi"], **JOB)).json()["id"])
        assert job["results"] is not None
        with monkeypatch.context() as small:
            small.setattr("app.api.endpoints.batch_results.MAX_SHOWN_BYTES", 100)
            assert (await client.get(f"/v1/batch/{job['id']}")).json()["results"] is None
        await client.delete(f"/v1/files/{job['output_file_id']}")
        job = (await client.get(f"/v1/batch/{job['id']}")).json()
        assert (job["status"], job["results"]) == ("completed", None)


async def test_a_job_that_cannot_begin_leaves_no_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, lambda request: [WAIT])
    async with http_client(service, tmp_path, batch_limits=BatchLimits(max_batches=1, max_file_bytes=10_000)) as client:
        first = (await post(client, ["Hi"], **JOB)).json()
        assert (await post(client, ["Hi"], **JOB)).status_code == 429
        assert [file["id"] for file in (await client.get("/v1/files")).json()["data"]] == [first["input_file_id"]]
        too_large = await post(client, ["Hi"] * 100, stop=["x" * 200], **JOB)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "request_too_large")
        assert len((await client.get("/v1/files")).json()["data"]) == 1
        assert not list((tmp_path / "drafts").iterdir())


@pytest.mark.parametrize("job_id", ["none", "batch_none", "..", "x" * 5000])
async def test_there_is_no_such_job(service: Service, tmp_path: Path, job_id: str) -> None:
    async with http_client(service, tmp_path) as client:
        assert (await client.get(f"/v1/batch/{job_id}")).status_code in (404, 405)


@pytest.mark.parametrize("path", ["/v1/batch", "/v1/batches"])
async def test_a_signed_webhook_tells_of_the_end(service: Service, tmp_path: Path, path: str) -> None:
    async with Receiver() as receiver:
        webhook = {"url": receiver.url, "secret": SECRET}
        webhooks = WebhooksConfig(allowed_networks=LOCAL)
        async with served(service, tmp_path, webhooks=webhooks) as app, client_of(app) as client:
            if path == "/v1/batch":
                asked: dict[str, Any] = {"prompts": ["Hi"], "async": True}
            else:
                asked = await sent_batch(client, line_of("a"))
            begun = (await client.post(path, json=asked | {"webhook": webhook})).json()
            assert begun["webhook"]["status"] == "waiting"
            [received] = await receiver.got(1)
            event = openai.OpenAI(api_key="none", webhook_secret=SECRET).webhooks.unwrap(
                received.body, received.headers
            )
            assert (event.type, event.data.id) == ("batch.completed", begun["id"])  # type: ignore[union-attr]
            job = await job_ended(client, begun["id"])
            assert SECRET not in json.dumps([begun, job])
            refused = await client.post(path, json=asked | {"webhook": webhook | {"url": "https://10.0.0.1/"}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "webhook.url")


@pytest.mark.parametrize("secret", [None, 5, [SECRET], SECRET * 20, "canary-secret"], ids=str)
async def test_a_refused_secret_is_not_repeated(service: Service, tmp_path: Path, secret: Any) -> None:
    async with http_client(service, tmp_path) as client:
        response = await post(client, ["Hi"], webhook={"url": "https://example.com/", "secret": secret}, **JOB)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "webhook.secret")
        assert SECRET not in response.text
        assert "canary" not in response.text


async def test_large_results_delay_no_other_request(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = Service(tokenizer, say(tokenizer, "3"))
    long = "é" * 30_000
    async with http_client(service, tmp_path) as client:
        content = b"".join(line_of(str(n), x=long) for n in range(250))
        assert len(content) > 14_000_000
        batch_id = await begun_batch(client, content)
        assert len((await job_ended(client, batch_id))["results"]) == 250
        async with stalls_of_loop() as stalls:
            await client.get(f"/v1/batch/{batch_id}")
        assert stalls.longest_s < 0.1 * slowness()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": chat("Hi"), "mood": 1}, "mood"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi", "mood": 1}]}, "messages[0].mood"),
        ("/v1/completions", {"prompt": "Hi", "stream_options": {"mood": 1}}, "stream_options.mood"),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"mood": 1}}}, "text.format.mood"),
        (
            "/v1/responses",
            {"input": [{"type": "message", "role": "user", "content": "Hi", "mood": 1}]},
            "input[0].mood",
        ),
        ("/v1/embeddings", {"input": "Hi", "mood": 1}, "mood"),
        ("/tokenize", {"prompt": "Hi", "mood": 1}, "mood"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi", "mood": 1}]}, "messages[0].mood"),
        ("/detokenize", {"tokens": [5], "mood": 1}, "mood"),
        ("/v1/batch", {"prompts": ["Hi"], "mood": 1}, "mood"),
        (
            "/v1/batch",
            {"prompts": ["Hi"], "async": True, "webhook": {"url": "https://a.example", "secret": "s", "mood": 1}},
            "webhook.mood",
        ),
        (
            "/v1/batches",
            {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "mood": 1},
            "mood",
        ),
    ],
)
async def test_every_route_names_unknown_fields_to_strict_callers(
    service: Service, tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with http_client(service, tmp_path) as client:
        refused = await client.post(path, json=body, headers={"x-strict": "true"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "x-strict" in refused.json()["error"]["message"]
        assert "there is no field" not in (await client.post(path, json=body)).text


async def test_a_strict_upload_names_unknown_fields_too(service: Service, tmp_path: Path) -> None:
    async with http_client(service, tmp_path) as client:
        upload: Any = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch", "mood": "good"}}
        refused = await client.post("/v1/files", headers={"x-strict": "true"}, **upload)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mood")
        assert (await client.get("/v1/files")).json()["data"] == []
        assert (await client.post("/v1/files", **upload)).status_code == 200


async def test_the_prompts_of_one_answer_share_its_logprobs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limits = RequestLimits(max_answer_logprobs=600)
    async with http_client(echoing(tokenizer), tmp_path, limits=limits) as client:
        many = ["1 + 1"] * 8
        asked = {"max_tokens": 100, "logprobs": 2}
        assert (await post(client, many[:2], **asked)).status_code == 200
        refused = await post(client, many, **asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        job = await job_ended(client, (await post(client, many, **asked, **JOB)).json()["id"])
        assert job["request_counts"]["completed"] == 8


async def test_the_prompts_of_one_answer_share_its_allowed_token_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Each request carries its own list to its replica: 128 lists of 16,384 ids would hold up the loop there."""
    async with http_client(echoing(tokenizer), tmp_path, limits=RequestLimits(max_allowed_token_ids=40)) as client:
        allowed = {"allowed_token_ids": list(range(300, 310)), "max_tokens": 2}
        assert (await post(client, ["Hi"] * 4, **allowed)).status_code == 200
        refused = await post(client, ["Hi"] * 5, **allowed)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids")
        body = {"prompt": ["Hi", "Ho"], **allowed}
        assert (await client.post("/v1/completions", json=body | {"n": 2})).status_code == 200
        refused = await client.post("/v1/completions", json=body | {"n": 3})
        assert "10 ids for each of 6 requests; this server accepts 40" in refused.json()["error"]["message"]
        job = await job_ended(client, (await post(client, ["Hi"] * 5, **allowed, **JOB)).json()["id"])
        assert job["request_counts"]["completed"] == 5


async def test_what_prompts_share_is_made_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    counting = CountingTokenizer(tokenizer._pretrained)
    service = Service(counting, say(counting, "3 4 5."))
    words = [f"word{number}" for number in range(128)]
    async with http_client(service, tmp_path) as client:
        answer = await client.post("/v1/batch", json={"prompts": ["Hi"] * 64, "bad_words": words, "max_tokens": 4})
        assert answer.json()["request_counts"] == {"total": 64, "completed": 64, "failed": 0}
    assert counting.num_texts <= 2 * len(words) + 70
    assert len({request.sampling.bad_words for request in service.generate.requests}) == 1
    assert len(service.generate.requests[0].sampling.bad_words) >= len(words)
