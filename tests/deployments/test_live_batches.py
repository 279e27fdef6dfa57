"""A whole batch by the real `openai` package on a live cluster, whose process is killed in the middle of it."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.conftest import SHARED
from tests.deployments.strikes import kill_batches
from tests.metrics.test_exposition import value
from tests.waiting import PATIENCE_S, eventually

MODEL = "switched"
CHAT = "/v1/chat/completions"
NUM_LINES = 200
SECRET = "whsec_" + "QUJD" * 8


class Inbox(http.server.ThreadingHTTPServer):
    """A receiver of webhooks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Note)
        self.received: queue.Queue[tuple[bytes, dict[str, str]]] = queue.Queue()


class _Note(http.server.BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.put((body, dict(self.headers)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def inbox() -> Iterator[Inbox]:
    with Inbox() as inbox:
        thread = threading.Thread(target=inbox.serve_forever)
        thread.start()
        yield inbox
        inbox.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def client(shared: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared}/v1", api_key="none", max_retries=10) as client:
        yield client


def line(number: int) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "ignore_eos": True}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body})


def test_every_line_ends_once_though_the_process_is_killed(client: openai.OpenAI) -> None:
    content = "\n".join(map(line, range(NUM_LINES))).encode()
    file = client.files.create(file=("night.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def completed() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    done = eventually(completed, lambda done: done >= NUM_LINES // 10)
    assert done < NUM_LINES
    kill_batches(SHARED)
    assert completed() >= done  # asked again and again until the next process answers
    batch = eventually(lambda: client.batches.retrieve(batch.id), lambda batch: batch.status == "completed")
    assert batch.output_file_id is not None
    assert batch.error_file_id is None
    lines = [json.loads(each) for each in client.files.content(batch.output_file_id).content.splitlines()]
    assert sorted(each["custom_id"] for each in lines) == sorted(f"line-{n}" for n in range(NUM_LINES))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 8 for each in lines)


def test_a_large_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    content = b"".join(b"%d\n" % n for n in range(500_000))
    file = client.files.create(file=("large.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted


def test_lines_are_measured_as_requests_are(client: openai.OpenAI) -> None:
    text = client._client.get(str(client.base_url).replace("/v1/", "/metrics")).text
    finished = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.labels["model_name"] == MODEL
    ]
    assert sum(finished) > 0
    # Since the process began that came after the killed one.
    assert 0 < value(text.encode(), "carousel_batch_lines_completed_total") < NUM_LINES
    assert value(text.encode(), "carousel_webhooks_pending") == 0


def test_a_list_of_prompts_is_answered_at_once(client: openai.OpenAI) -> None:
    prompts = ["Once", "", "Twice"]
    body = {"model": MODEL, "prompts": prompts, "max_tokens": 5, "ignore_eos": True}
    answer = client.post("/batch", body=body, cast_to=object)
    assert isinstance(answer, dict)
    assert [each["status_code"] for each in answer["results"]] == [200, 400, 200]
    assert answer["usage"]["output_tokens"] == 10


def test_a_job_ends_and_its_webhook_comes_though_the_process_is_killed(client: openai.OpenAI, inbox: Inbox) -> None:
    webhook = {"url": f"http://127.0.0.1:{inbox.server_port}/hook", "secret": SECRET}
    body = {"model": MODEL, "prompts": ["Once"] * 60, "max_tokens": 8, "ignore_eos": True}
    body |= {"async": True, "webhook": webhook}
    job = client.post("/batch", body=body, cast_to=object)
    assert isinstance(job, dict)
    kill_batches(SHARED)
    sent, headers = inbox.received.get(timeout=PATIENCE_S)
    event = openai.OpenAI(api_key="none").webhooks.unwrap(sent, headers, secret=SECRET)
    assert event.type == "batch.completed"
    assert event.data.id == job["id"]
    job = client.get(f"/batch/{job['id']}", cast_to=object)
    assert isinstance(job, dict)
    assert (job["status"], job["progress"], job["webhook"]["id"]) == ("completed", 1, event.id)
    assert [each["index"] for each in job["results"]] == list(range(60))
    stats = client.get("/batch/stats", cast_to=object)
    assert isinstance(stats, dict)
    assert stats["batches"]["completed"] >= 1
