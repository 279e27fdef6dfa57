"""A message of the playground that has no token yet says where its request is, as far as the page knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.service import KEY, entry
from tests.page.stage import Stage
from tests.waiting import eventually

PENDING = ".message.assistant .pending > span >> nth=0"


def send(page: Any, text: str) -> None:
    page.wait_for_selector("#model option", state="attached")
    page.fill("#prompt", text)
    page.click("#send")


def test_a_message_waits_in_the_queue_then_its_prompt_is_read_then_the_answer_replaces_this(
    page: Any, demo_path: Path
) -> None:
    model = {"path": str(demo_path), "simulated": {"step_ms": 150.0}}
    scheduler = {"max_running": 2, "max_step_tokens": 32, "prefill_chunk_tokens": 32}
    with Stage(demo_path, num_replicas=1, model=model, scheduler=scheduler, cache={"num_blocks": 400}) as stage:
        page.goto(stage.url)
        page.wait_for_selector(".replica .head [data-of=running]")
        page.evaluate("""() => {
            const asked = { model: "demo", prompt: ["One", "Two", "Three"], max_tokens: 12, ignore_eos: true };
            const body = JSON.stringify(asked);
            fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body });
        }""")
        page.wait_for_selector(".queue li")
        page.click("#tab-playground")
        page.evaluate("""() => {
            window.said = [];
            const note = () => said.push(document.querySelector(".pending > span")?.textContent);
            new MutationObserver(note).observe(document.getElementById("messages"), { childList: true, subtree: true });
        }""")
        page.fill("#max_tokens", "16")
        send(page, "word " * 400)
        page.wait_for_selector(".cost")
        said = [text for text in page.evaluate("said") if text]
        queued = next(n for n, text in enumerate(said) if text.startswith("waiting in the queue of replica1: "))
        reading = next(n for n, text in enumerate(said) if text.startswith("replica1 is reading the prompt, "))
        assert queued < reading
        assert page.locator(".pending").count() == 0
        assert len(page.evaluate("document.querySelector('.message.assistant').firstChild.data")) > 10


def test_without_a_live_view_it_says_that_there_is_no_token_yet(page: Any, demo_path: Path) -> None:
    with Stage(demo_path, num_replicas=1, keys=[entry()]) as stage:
        page.goto(f"{stage.url}/#playground")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.route("**/v1/chat/completions", lambda route: None)  # it is never answered
        send(page, "Hello")
        assert page.inner_text(PENDING) == "waiting for the first token…"
        time = ".pending .time"
        before = page.inner_text(time)
        eventually(lambda: page.inner_text(time), lambda now: now != before)
        page.click("#stop")
        page.wait_for_selector(".message.assistant:has-text('(stopped before the first token)')")
        assert page.locator(".pending").count() == 0


def test_a_stream_that_begins_before_its_first_token_tells_its_place_in_the_queue(page: Any, demo_path: Path) -> None:
    headers = {"x-carousel-queue-position": "7", "x-carousel-replica": "replica1"}
    with Stage(demo_path, num_replicas=1, keys=[entry()]) as stage:
        page.goto(f"{stage.url}/#playground")
        told = page.evaluate(
            """async (headers) => {
                const { showWaiting } = await import("/page/waiting.js");
                const place = document.getElementById("messages");
                const waiting = showWaiting(place, "page-1", performance.now());
                waiting.takeHeaders(new Headers(headers));
                const all = { childList: true, subtree: true };
                await new Promise((resolve) => new MutationObserver(resolve).observe(place, all));
                return place.querySelector(".pending > span").textContent;
            }""",
            headers,
        )
        assert told == "waiting for the first token: the queue of replica1 had 7 requests before this one…"
