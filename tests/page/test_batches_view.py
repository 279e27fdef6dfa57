"""The view "Batches": a table of batches, the errors of their files, and their webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.conftest import Picture
from tests.page.stage import Stage
from tests.waiting import eventually
from tests.webhooks.receivers import SECRET


@pytest.fixture
def stage(browser: Any, demo_path: Path, tmp_path: Path) -> Iterator[Stage]:
    with Stage(demo_path, num_replicas=1, batches=tmp_path, scheduler={"max_running": 8}) as started:
        yield started


class Receiver(BaseHTTPRequestHandler):
    """Takes messages at `/taken`, and has gone for good at any other path."""

    def do_POST(self) -> None:
        self.send_response(200 if self.path == "/taken" else 410)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def lines(number: int, model: str = "demo") -> list[str]:
    body = {"model": model, "prompt": "Hello", "max_tokens": 2}
    return [
        json.dumps({"custom_id": f"{model}-{each}", "method": "POST", "url": "/v1/completions", "body": body})
        for each in range(number)
    ]


def begin_batch(stage: Stage, content: list[str], webhook: str | None = None) -> str:
    with httpx.Client(base_url=stage.url) as client:
        files = {"file": ("night.jsonl", "\n".join(content))}
        file = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        if webhook is not None:
            body["webhook"] = {"url": webhook, "secret": SECRET}
        return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


NEXT_LOOK_MS = 5000  # at the latest: the page looks at the batches again, also where all of them have ended


def open_view(page: Any, stage: Stage) -> None:
    """Opens the view. The page's clock goes on by itself, and a test may set it forward."""
    page.clock.install()
    page.goto(f"{stage.url}/#batches")


def looks_again(page: Any) -> None:
    """The page has asked for the batches once more."""
    with page.expect_event("requestfinished", lambda request: "/v1/batches" in request.url):
        page.clock.fast_forward(NEXT_LOOK_MS)


def eventually_shown(page: Any, look: Callable[[], Any], is_reached: Callable[[Any], Any] = bool) -> None:
    """As `eventually`, at each look of the page."""

    def looked() -> Any:
        looks_again(page)
        return look()

    eventually(looked, is_reached)


def cells(page: Any, batch_id: str) -> dict[str, str]:
    """The texts of a batch's row, by column."""
    row = page.locator("#batch-list tr", has_text=batch_id)
    names = row.locator("td").evaluate_all("cells => cells.map((cell) => cell.dataset.of)")
    return dict(zip(names, row.locator("td").all_inner_texts(), strict=True))


def test_a_batch_is_a_row_with_time_model_progress_state_and_webhook(
    page: Any, stage: Stage, receiver: str, picture: Picture
) -> None:
    taken = begin_batch(stage, lines(20), f"{receiver}/taken")
    gone = begin_batch(stage, lines(3), f"{receiver}/gone")
    mixed = begin_batch(stage, [*lines(2), *lines(1, "other")])
    open_view(page, stage)
    page.wait_for_selector("#batch-list th")
    heads = page.locator("#batch-list").get_by_role("columnheader").all_inner_texts()
    assert heads == ["created", "batch", "model", "progress", "state", "webhook", "actions"]
    eventually_shown(page, lambda: cells(page, taken)["webhook"], lambda text: text == "delivered")
    shown = cells(page, taken)
    assert (shown["batch_model"], shown["progress"], shown["batch_state"]) == ("demo", "20 of 20 done", "completed")
    assert "ended " in shown["created"]
    created = page.locator("#batch-list tr", has_text=taken).locator("time").get_attribute("datetime")
    seconds = page.evaluate("(created) => new Date(created).getTime() / 1000", created)
    assert seconds == httpx.get(f"{stage.url}/v1/batches/{taken}").json()["created_at"]
    eventually_shown(
        page, lambda: cells(page, gone)["webhook"], lambda text: text == "given up\nthe receiver answered with 410"
    )
    eventually_shown(page, lambda: cells(page, mixed)["batch_state"], lambda text: text == "completed")
    shown = cells(page, mixed)
    assert (shown["batch_model"], shown["webhook"], shown["progress"]) == ("several", "none", "2 of 3 done\n1 failed")
    assert shown["actions"].split() == ["Results", "Errors"]
    failed = begin_batch(stage, [*lines(3), *["no JSON"] * 3])
    eventually_shown(page, lambda: failed in page.inner_text("#batch-list"))
    picture(page, "batches")


def test_a_failed_batch_names_the_lines_of_its_errors_and_lists_more(page: Any, stage: Stage) -> None:
    good = lines(3)
    batch_id = begin_batch(stage, [*good, *["no JSON"] * 30])
    one = begin_batch(stage, [*good, "[1]", "no JSON"])
    open_view(page, stage)
    page.wait_for_selector(".why >> nth=1")
    assert cells(page, batch_id)["batch_state"] == "failed"
    assert cells(page, batch_id)["progress"] == "nothing has run"
    first, many = page.locator("#batch-list .why").all()
    assert cells(page, one)["batch_state"] == "failed"
    assert first.inner_text().splitlines() == ["line 4: the line should be a JSON object", "and 1 more error"]
    message = "the line is not valid JSON: expected ident at column 2"
    assert many.inner_text().splitlines() == [f"line 4: {message}", "and 29 more errors"]
    many.locator("summary").click()
    listed = many.locator("li").all_inner_texts()
    assert listed[:20] == [f"line {number}: {message}" for number in range(5, 25)]
    assert listed[20:] == ["and 9 more in the response of /v1/batches"]
    for _ in range(2):
        looks_again(page)
    assert many.locator("li >> nth=20").is_visible(), "the list stays open"


def test_a_paused_batch_says_why(page: Any, stage: Stage) -> None:
    batch_id = begin_batch(stage, lines(1))
    batch = httpx.get(f"{stage.url}/v1/batches/{batch_id}").json()
    paused = {"code": "storage_full", "message": "the disk has 1 GiB left"}
    answer = {"data": [batch | {"status": "in_progress", "paused": paused}]}
    page.route("**/v1/batches?limit=20", lambda route: route.fulfill(json=answer))
    page.goto(f"{stage.url}/#batches")
    page.wait_for_selector(".paused")
    assert cells(page, batch_id)["batch_state"] == "in progress\npaused: the disk has 1 GiB left"
