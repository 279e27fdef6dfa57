"""The service as a whole on a real Ray cluster: HTTP through HAProxy, two replicas, dispatch, overload, disconnects."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import ray
from ray import serve
from ray.serve._private import constants
from ray.serve.config import RequestRouterConfig

from app.config import IngressConfig
from app.engine.request import Request, SamplingParams
from app.errors import InvalidSetup
from app.fleet import Address, connect
from app.fleet.frames import SubmitRequest, encode, frame_decoder
from deployments.launcher.supervisor import session_members
from deployments.serve.application import _ingress_deployment, _replica_deployment, build
from deployments.serve.settings import parse
from deployments.serve.transport import FramesFrom
from tests.demo_tasks import Question, mixed_questions
from tests.deployments.conftest import Service, steps_of
from tests.deployments.strikes import replica_pids
from tests.waiting import PATIENCE_S, eventually

LONG = 2000  # tokens: nearly all of the context, and ten seconds of steps at least


def ask(service: Service, model: str, prompt: str = "Count from 3 to 9.", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8} | fields
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def test_web_pages_are_refused_through_the_proxy_and_names_of_this_machine_are_not(service: Service) -> None:
    """The proxy passes Host and Origin on; the service has no keys, so it answers to loopback's names alone."""
    body = {"model": "least", "prompt": "3", "max_tokens": 1}

    def statuses(**headers: str) -> tuple[int, int]:
        asked = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        listed = httpx.get(f"{service.url}/admin/keys", headers=headers, timeout=PATIENCE_S)
        return listed.status_code, asked.status_code

    port = service.url.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", "localhost", "localhost:18000", "[::1]:8000", "chat.localhost"):
        assert statuses(host=host) == (200, 200), host
        assert statuses(host=host, origin=f"http://{host}") == (200, 200), host
    assert statuses(host="evil.example") == (403, 403)
    assert statuses(host="evil.example", **{"x-forwarded-host": "localhost"}) == (403, 403)
    assert statuses(origin="https://evil.example") == (403, 403)
    form = {"content-type": "application/x-www-form-urlencoded"}
    sent = httpx.post(f"{service.url}/v1/completions", content=json.dumps(body), headers=form, timeout=PATIENCE_S)
    assert (sent.status_code, sent.json()["error"]["code"]) == (415, "unsupported_media_type")


@contextmanager
def long_stream(service: Service, model: str) -> Iterator[httpx.Response]:
    """A stream that has begun and is not read on."""
    body = {"model": model, "prompt": "Once", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        yield response


@contextmanager
def received_tokens(addresses: Sequence[Address], requests: Sequence[Request]) -> Iterator[Mapping[str, list[int]]]:
    """The tokens of these requests by their id, as they arrive. The replicas get the requests in turn."""
    tokens: dict[str, list[int]] = {}

    class Receiver(asyncio.Protocol):
        def __init__(self) -> None:
            self._decoder = frame_decoder()

        def data_received(self, data: bytes) -> None:
            for frame in self._decoder.feed(data):
                for delta in frame.deltas:
                    if delta.token_ids:
                        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)

    async def receive(is_over: asyncio.Event) -> None:
        streams = [await connect(each, "test", Receiver(), heartbeat_s=10) for each in addresses]
        for number, request in enumerate(requests):
            streams[number % len(streams)].write(encode(SubmitRequest(request)))
        await is_over.wait()
        for stream in streams:
            stream.close()

    loop, is_over = asyncio.new_event_loop(), asyncio.Event()
    with ThreadPoolExecutor(max_workers=1) as thread:
        receiving = thread.submit(loop.run_until_complete, receive(is_over))
        try:
            yield tokens
        finally:
            loop.call_soon_threadsafe(is_over.set)
            receiving.result()
            loop.close()


def num_finished(stats: list[Any]) -> list[int]:
    return [each.total_finished for each in stats]


def test_every_endpoint_that_says_how_it_goes_is_there(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert httpx.get(f"{service.url}/ready").status_code == 200
    listed = [model["id"] for model in httpx.get(f"{service.url}/v1/models").json()["data"]]
    assert listed == ["turns", "least", "narrow", "trial", "ranker", "dozing", "first", "second", "unsure", "found"]


def test_log_probabilities_come_the_whole_way(service: Service) -> None:
    """From the engine's process over the frames: of a prompt and of what is generated, whole and streamed."""
    asked: dict[str, Any] = {"model": "turns", "prompt": [5, 20, 21, 22, 23], "max_tokens": 4, "temperature": 0}
    asked |= {"echo": True, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        [choice] = client.completions.create(**asked).choices
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert found.token_logprobs[0] is None
        assert len(found.token_logprobs) == 9
        drawn = list(zip(found.token_logprobs, found.top_logprobs, strict=True))[5:]
        assert all(value == max(top.values()) for value, top in drawn), "greedy: the likeliest was drawn"
        streamed: list[Any] = []
        for chunk in client.completions.create(**asked, stream=True):
            for each in chunk.choices:
                streamed += (each.logprobs.token_logprobs or []) if each.logprobs else []
        assert streamed == pytest.approx(found.token_logprobs, abs=1e-6)


def test_the_openai_package_streams_a_chat(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.create(
            model="turns",
            messages=[{"role": "user", "content": "Spell the word river."}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        whole = client.chat.completions.create(
            model="turns",
            messages=[{"role": "user", "content": "Spell the word river."}],
            max_tokens=12,
            temperature=0,
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_replies_and_embeddings_come_from_the_same_replicas(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "turns", "input": "Spell the word river.", "max_output_tokens": 12, "temperature": 0}
        reply = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            assert stream.get_final_response().output_text == reply.output_text != ""
        texts = [f"Count from {number} to 20." for number in range(16)]
        together = client.embeddings.create(model="turns", input=texts).data
        alone = [client.embeddings.create(model="turns", input=text).data[0] for text in texts[:4]]
    assert {len(each.embedding) for each in together} == {len(alone[0].embedding)}
    for number, each in enumerate(alone):
        assert each.embedding == pytest.approx(together[number].embedding, abs=1e-5)


def test_a_cascade_asks_the_large_model_where_the_small_one_is_not_certain(service: Service) -> None:
    answer = ask(service, "unsure", prompt="Name a colour.", temperature=1.5, seed=1)
    assert answer.status_code == 200
    assert answer.json()["model"] == answer.headers["x-carousel-pipeline-model"] == "least"
    small, large = answer.json()["usage"]["pipeline"]["steps"]
    assert (small["model"], small["mean_logprob"] < 0, large["model"]) == ("turns", True, "least")


def test_documents_are_ranked_by_an_encoder_and_the_best_one_is_read_by_the_model(service: Service) -> None:
    documents = ["w6 w7", "w4 w5 w9", "w8"]
    body = {"model": "ranker", "query": "w4 w5"}

    def results(documents: list[str]) -> list[dict[str, Any]]:
        asked = body | {"documents": documents}
        answer = httpx.post(f"{service.url}/v1/rerank", json=asked, timeout=PATIENCE_S)
        return answer.json()["results"]  # type: ignore[no-any-return]

    ranked = results(documents)
    assert sorted(each["index"] for each in ranked) == [0, 1, 2]
    assert ranked == sorted(ranked, key=lambda each: -each["relevance_score"])
    alone = [results([document])[0] for document in documents]
    for each in ranked:
        assert each["relevance_score"] == pytest.approx(alone[each["index"]]["relevance_score"], abs=1e-5)
    answer = ask(service, "found", prompt="w4 w5", documents=documents)
    step, _ = answer.json()["usage"]["pipeline"]["steps"]
    assert [each["index"] for each in step["kept"]] == [ranked[0]["index"]]


def test_questions_about_a_text_are_answered_by_probabilities(service: Service) -> None:
    levels = [{"label": "short"}, {"label": "long"}]
    questions: list[Any] = [
        {"type": "score", "instructions": f"How long is word {number}?", "levels": levels} for number in range(8)
    ]
    text = "Count from 3 to 9. " * 40
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        decision = client.decisions.create(model="turns", input=text, questions=questions)
    assert [each.type for each in decision.answers] == ["score"] * 8
    usage = decision.usage
    assert usage.output_tokens == 8
    # On one of two replicas, seven of them begin with what the first one has left there.
    assert usage.input_tokens_details.cached_tokens > usage.input_tokens / 2


def test_mixed_questions_all_at_once_are_all_answered_right(service: Service) -> None:
    questions = mixed_questions(64, seed=5)

    async def answer(client: httpx.AsyncClient, question: Question) -> str:
        body = {
            "model": "turns",
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": 200,
            "temperature": 0,
        }
        response = await client.post(f"{service.url}/v1/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    async def answers() -> list[str]:
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=64)) as client:
            return await asyncio.gather(*(answer(client, question) for question in questions))

    before = num_finished(service.stats("turns"))
    given = asyncio.run(answers())
    wrong = [(q.prompt, q.answer, text) for q, text in zip(questions, given, strict=True) if text.strip() != q.answer]
    assert not wrong
    after = service.eventually("turns", lambda stats: sum(num_finished(stats)) == sum(before) + 64)
    shares = [new - old for new, old in zip(num_finished(after), before, strict=True)]
    assert min(shares) > 0, f"two replicas shared 64 requests as {shares}"


def test_round_robin_alternates(service: Service) -> None:
    served = []
    before = num_finished(service.stats("turns"))
    for _ in range(8):
        assert ask(service, "turns").status_code == 200
        total = sum(before) + 1
        after = num_finished(service.eventually("turns", lambda stats, total=total: sum(num_finished(stats)) == total))
        served.append([new - old for new, old in zip(after, before, strict=True)].index(1))
        before = after
    assert served in ([0, 1] * 4, [1, 0] * 4)


def test_least_loaded_avoids_the_busy_replica(service: Service) -> None:
    with long_stream(service, "least"):
        before = service.stats("least")
        busy = [each.num_running for each in before].index(1)
        for _ in range(4):
            assert ask(service, "least", max_tokens=2).status_code == 200
        total = sum(num_finished(before)) + 4
        after = service.eventually("least", lambda stats: sum(num_finished(stats)) == total)
        assert after[busy].total_finished == before[busy].total_finished


def test_the_same_seed_gives_the_same_tokens_on_either_replica(service: Service) -> None:
    def sample(seed: int) -> str:
        response = ask(service, "turns", seed=seed, temperature=1.5, max_tokens=24, ignore_eos=True)
        return str(response.json()["choices"][0]["message"]["content"])

    # One after the other goes to one replica after the other.
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_client_that_goes_away_frees_its_blocks(service: Service) -> None:
    [before] = service.stats("narrow")
    with long_stream(service, "narrow"):
        [during] = service.stats("narrow")
        assert (during.num_running, during.total_finished) == (1, before.total_finished)
        assert during.num_free_blocks < during.num_blocks
    [after] = service.eventually("narrow", lambda stats: stats[0].total_aborted == before.total_aborted + 1)
    assert (after.num_running, after.num_waiting, after.num_free_blocks) == (0, 0, after.num_blocks)


def test_more_than_the_replicas_hold_gets_429_at_once(service: Service) -> None:
    async def flood() -> list[httpx.Response]:
        # So long that the two that are taken still run when the last of the eight comes, on a busy machine too.
        body = {"model": "narrow", "prompt": "Once", "max_tokens": 400, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(client.post(f"{service.url}/v1/completions", json=body) for _ in range(8)))

    service.until_free("narrow")
    responses = asyncio.run(flood())
    refused = [response for response in responses if response.status_code == 429]
    assert sorted(response.status_code for response in responses) == [200] * 2 + [429] * 6
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert all("full" in response.json()["error"]["message"] for response in refused)
    first_end = min(response.elapsed for response in responses if response.status_code == 200)
    assert max(response.elapsed for response in refused) < first_end, "no request waited for a place"
    assert ask(service, "narrow").status_code == 200


def test_a_full_service_is_still_ready(service: Service) -> None:
    has_been_seen = threading.Event()

    def take_the_second_place() -> None:
        with long_stream(service, "narrow"):
            has_been_seen.wait(timeout=PATIENCE_S)

    service.until_free("narrow")
    with ThreadPoolExecutor() as threads, long_stream(service, "narrow"):
        second = threads.submit(take_the_second_place)
        service.eventually("narrow", lambda stats: (stats[0].num_running, stats[0].num_waiting) == (1, 1))
        time.sleep(1.1)  # longer than a yes is remembered
        is_full_before = ask(service, "narrow").status_code == 429
        ready = httpx.get(f"{service.url}/ready").status_code
        is_full_after = ask(service, "narrow").status_code == 429
        has_been_seen.set()
    second.result()
    assert (is_full_before, ready, is_full_after) == (True, 200, True)


def test_the_ingress_has_no_torch_and_replicas_with_weights_do(service: Service) -> None:
    # Found by the title that Ray gives each process, with the method that runs, among those of this session.
    loads_torch = {}
    for pid in session_members(os.getsid(0)):
        with suppress(OSError):  # it ended meanwhile, as workers of Ray do
            title = Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
            if title.startswith("ray::ServeReplica:carousel:"):
                loads_torch[title.rpartition(":")[2].partition(".")[0]] = (
                    "libtorch" in Path(f"/proc/{pid}/maps").read_text()
                )
    with_weights = {"replica-turns", "replica-ranker", "replica-dozing"}
    others = {"ingress", "replica-least", "replica-narrow", "replica-trial", "replica-first", "replica-second"}
    assert loads_torch == dict.fromkeys(with_weights, True) | dict.fromkeys(others, False)


@pytest.mark.parametrize("deployment", ["ingress", "replica-turns"])
def test_processes_that_serve_have_the_priority_of_what_started_ray(service: Service, deployment: str) -> None:
    [pid, *_] = replica_pids("carousel", deployment)
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_new_settings_reach_every_replica_without_losing_a_request_or_restarting_one(
    cluster: str, demo_path: Path
) -> None:
    [model] = parse(
        {
            "models": [
                {
                    "name": "retuned",
                    "engine": {"model": {"path": str(demo_path), **steps_of(10)}, "cache": {"num_blocks": 256}},
                    "replicas": {"num_replicas": 2, "num_cpus": 0.1, "drain_timeout_s": 1},
                }
            ]
        }
    ).models
    # Here it is the ingress of an application, which cannot have a router of its own under HAProxy. The version is what
    # Serve derives from a config file: as long as it is the same, replicas stay.
    replicas = _replica_deployment(model, IngressConfig()).options(
        request_router_config=RequestRouterConfig(), version="1", _internal=True
    )

    def deploy(scheduler: dict[str, Any]) -> Any:
        application = replicas.options(user_config={"scheduler": scheduler}).bind(model, [1, 1])
        handle = serve.run(application, name="retuned", route_prefix=None)
        handle = serve.get_deployment_handle("replica-retuned", "retuned")
        if not handle.is_initialized:
            handle._init(_run_router_in_separate_loop=True)
        return handle

    def stats(handle: Any) -> list[Any]:
        return list(handle.broadcast("stats").results(timeout_s=PATIENCE_S))

    handle = deploy({"policy": "sjf"})
    assert {(each.strategy, each.policy) for each in stats(handle)} == {("continuous", "sjf")}
    sampling = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    addresses = list(handle.broadcast("frame_address", FramesFrom("")).results(timeout_s=PATIENCE_S))
    requests = [Request(request_id=name, prompt_token_ids=(5, 6), sampling=sampling) for name in ("a", "b", "c")]
    with received_tokens([Address._make(each) for each in addresses], requests) as tokens:
        eventually(lambda: len(tokens) == 3)
        before = stats(handle)
        handle = deploy({"strategy": {"name": "static", "max_wait_ms": 20}, "policy": "fair"})
        after = stats(handle)  # `serve.run` returned: every replica has said that they hold
        eventually(lambda: all(len(each) == 300 for each in tokens.values()))
    assert {(each.strategy, each.policy) for each in after} == {("static", "fair")}
    assert sum(each.total_steps for each in after) >= sum(each.total_steps for each in before) > 0  # the same processes
    assert tokens["a"] == tokens["b"] == tokens["c"]
    serve.delete("retuned", _blocking=False)


def test_the_builder_itself_refuses_parts_that_do_not_fit() -> None:
    config = parse({"models": [{}]})
    [model] = config.models
    on_gpu = model.engine.model.model_copy(update={"device": "cuda"})
    engine = model.engine.model_copy(update={"model": on_gpu})
    with pytest.raises(InvalidSetup, match="set num_gpus to 1"):
        build(config.model_copy(update={"models": (model.model_copy(update={"engine": engine}),)}))


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_an_update_starts_an_ingress_before_it_stops_one(num_replicas: int) -> None:
    deployment = _ingress_deployment(parse({"models": [{}], "ingress": {"num_replicas": num_replicas}}))
    surge_percent: int = deployment._deployment_config.max_surge_percent
    assert math.ceil(surge_percent * num_replicas / 100) == 1, "as Serve rounds it"


def test_an_update_may_start_replicas_before_it_stops_any() -> None:
    [model] = (config := parse({"models": [{"replicas": {"max_surge_percent": 50}}]})).models
    assert _replica_deployment(model, config.ingress)._deployment_config.max_surge_percent == 50


def test_a_proxy_that_starts_slowly_is_not_killed_while_serve_waits_for_it() -> None:
    """As Serve has read the launcher's environment: so many tries, of so many seconds, have to fail in a row."""
    assert constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD * constants.PROXY_READY_CHECK_TIMEOUT_S >= (
        constants.HTTP_PROXY_TIMEOUT
    )


def test_nothing_of_the_cluster_is_shared_with_other_clusters(cluster: str) -> None:
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")


def is_loopback(address: str) -> bool:
    ip = ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def test_nothing_that_takes_calls_listens_beyond_this_machine(service: Service) -> None:
    """Only HAProxy's two pages of statistics do; Serve has no setting for them."""
    open_to_others = set[tuple[str, int]]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            open_to_others |= {
                (process.name(), connection.laddr.port)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
            }
    pages = {int(os.environ[f"RAY_SERVE_HAPROXY_{page}_PORT"]) for page in ("STATS", "METRICS")}
    assert {port for _, port in open_to_others} <= pages, (open_to_others, pages)
