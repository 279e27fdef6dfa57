"""A batch by the real `openai` package and a job, on a live cluster, whose process is killed in the middle of both."""

from __future__ import annotations

import http.server
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.conftest import SHARED
from tests.deployments.strikes import kill_batches
from tests.metrics.test_exposition import value
from tests.waiting import PATIENCE_S, eventually

MODEL = "switched"
CHAT = "/v1/chat/completions"
NUM_LINES, NUM_PROMPTS = 200, 60
MAX_IN_FLIGHT = 8  # as `shared` has it
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


@dataclass(frozen=True, slots=True)
class Killed:
    """What was under way when the process was killed."""

    batch_id: str
    num_completed: int  # lines
    job_id: str
    events: list[ResponseStreamEvent]  # of a kept response, those that had come
    stream: openai.Stream[ResponseStreamEvent]  # of another, at its beginning


def num_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


@pytest.fixture(scope="module")
def killed(client: openai.OpenAI, inbox: Inbox) -> Killed:
    content = "\n".join(map(line, range(NUM_LINES))).encode()
    file = client.files.create(file=("night.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = eventually(lambda: num_completed(client, batch.id), lambda done: done >= NUM_LINES // 10)
    webhook = {"url": f"http://127.0.0.1:{inbox.server_port}/hook", "secret": SECRET}
    body = {"model": MODEL, "prompts": ["Once"] * NUM_PROMPTS, "max_tokens": 8, "ignore_eos": True}
    body |= {"async": True, "webhook": webhook}
    job = client.post("/batch", body=body, cast_to=object)
    assert isinstance(job, dict)
    assert done < NUM_LINES
    with begun_response(client) as stream:
        events = list(islice(stream, 5))
    followed = begun_response(client)
    assert next(followed).type == "response.created"
    kill_batches(SHARED)
    return Killed(batch.id, done, job["id"], events, followed)


def begun_response(client: openai.OpenAI) -> openai.Stream[ResponseStreamEvent]:
    return client.responses.create(
        model=MODEL, input="Once", max_output_tokens=100, store=True, background=True, stream=True,
        extra_body={"ignore_eos": True, "seed": 1},
    )  # fmt: skip


def test_a_kept_response_goes_on_behind_what_had_come(client: openai.OpenAI, killed: Killed) -> None:
    [created, *_] = killed.events
    assert created.type == "response.created"
    rest = list(client.responses.retrieve(created.response.id, stream=True, starting_after=4))
    events = killed.events + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert text_of(events) == text_of(begun_response(client))
    last = events[-1]
    assert last.type == "response.incomplete"  # at its length
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 100
    assert client.responses.retrieve(created.response.id) == last.response


def test_a_client_that_reads_a_kept_response_reads_on_in_the_same_answer(client: openai.OpenAI, killed: Killed) -> None:
    events = list(killed.stream)
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert text_of(events) == text_of(begun_response(client))


def text_of(events: Iterable[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_every_line_ends_once_though_the_process_is_killed(client: openai.OpenAI, killed: Killed) -> None:
    # Asked again and again until the next process answers.
    assert num_completed(client, killed.batch_id) >= killed.num_completed
    batch = eventually(lambda: client.batches.retrieve(killed.batch_id), lambda batch: batch.status == "completed")
    assert batch.output_file_id is not None
    assert batch.error_file_id is None
    lines = [json.loads(each) for each in client.files.content(batch.output_file_id).content.splitlines()]
    assert sorted(each["custom_id"] for each in lines) == sorted(f"line-{n}" for n in range(NUM_LINES))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 8 for each in lines)


def test_a_job_ends_and_its_webhook_comes_though_the_process_is_killed(
    client: openai.OpenAI, killed: Killed, inbox: Inbox
) -> None:
    sent, headers = inbox.received.get(timeout=PATIENCE_S)
    event = openai.OpenAI(api_key="none").webhooks.unwrap(sent, headers, secret=SECRET)
    assert event.type == "batch.completed"
    assert event.data.id == killed.job_id
    job = client.get(f"/batch/{killed.job_id}", cast_to=object)
    assert isinstance(job, dict)
    assert (job["status"], job["progress"], job["webhook"]["id"]) == ("completed", 1, event.id)
    assert [each["index"] for each in job["results"]] == list(range(NUM_PROMPTS))
    stats = client.get("/batch/stats", cast_to=object)
    assert isinstance(stats, dict)
    assert stats["batches"]["completed"] >= 1


def test_the_ledger_has_each_line_once_though_its_process_was_killed(client: openai.OpenAI, killed: Killed) -> None:
    def num_used() -> int:
        url = str(client.base_url).replace("/v1/", "/admin/usage?group_by=model,class")
        rows = client._client.get(url).json()["data"]
        return sum(row["requests"] for row in rows if (row["model"], row["class"]) == (MODEL, "background"))

    num_lines = NUM_LINES + NUM_PROMPTS
    used = eventually(num_used, lambda used: used >= num_lines)
    # Lines that had ended, and were not known to have when the process was killed, were computed again.
    assert used <= num_lines + MAX_IN_FLIGHT


def test_a_large_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    content = b"".join(b"%d\n" % n for n in range(500_000))
    file = client.files.create(file=("large.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    assert client.files.delete(file.id).deleted


@pytest.mark.usefixtures("killed")
def test_lines_are_measured_as_requests_are(client: openai.OpenAI) -> None:
    def metrics() -> str:
        return client._client.get(str(client.base_url).replace("/v1/", "/metrics")).text

    text = eventually(metrics, lambda text: value(text.encode(), "carousel_webhooks_pending") == 0)
    finished = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.labels["model_name"] == MODEL
    ]
    assert sum(finished) > 0
    # Since the process began that came after the killed one.
    assert 0 < value(text.encode(), "carousel_batch_lines_completed_total") < NUM_LINES + NUM_PROMPTS


def test_a_list_of_prompts_is_answered_at_once(client: openai.OpenAI) -> None:
    prompts = ["Once", "", "Twice"]
    body = {"model": MODEL, "prompts": prompts, "max_tokens": 5, "ignore_eos": True}
    answer = client.post("/batch", body=body, cast_to=object)
    assert isinstance(answer, dict)
    assert [each["status_code"] for each in answer["results"]] == [200, 400, 200]
    assert answer["usage"]["output_tokens"] == 10
