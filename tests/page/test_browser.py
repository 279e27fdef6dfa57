"""The page in a real Chromium, on a stage without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.service import ADMIN_KEY, KEY, entry
from tests.page.conftest import Picture
from tests.page.sight import colours, seen, stays
from tests.page.stage import Stage
from tests.waiting import eventually

ENGINE: dict[str, Any] = {"scheduler": {"max_running": 8, "max_waiting": 256}, "cache": {"num_blocks": 400}}


@pytest.fixture(scope="module")
def stage(browser: Any, demo_path: Path) -> Iterator[Stage]:
    with Stage(demo_path, **ENGINE) as started:
        yield started


def test_the_page_shows_all_replicas(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".replica >> nth=1")
    page.wait_for_selector("#connection.on")
    page.wait_for_selector(".queue:has-text('Queue: empty')")
    assert "running 0 of 8 slots" in page.inner_text(".head >> nth=0")
    page.wait_for_selector("#demo:text('Send 40 demo requests')")
    sizes = page.evaluate("import('/page/demo.js').then(({ demoSize }) => [0, 16, 64, 5000].map(demoSize))")
    assert sizes == [40, 40, 160, 400], "more than there are slots"


def test_forty_demo_requests_turn_through_the_slots(page: Any, stage: Stage, picture: Picture) -> None:
    page.goto(stage.url)
    page.select_option("#window", "15")
    page.wait_for_selector(".replica >> nth=1")
    num_colours = colours(page)
    page.click("#demo")
    page.wait_for_selector(".queue li >> nth=3")  # more than there are slots
    eventually(lambda: colours(page), lambda found: found > num_colours + 8)
    eventually(lambda: {stay[0] for stay in stays(page)}, lambda ids: len(ids) == 40)
    picture(page, "live", after_s=2)
    eventually(lambda: [stay for stay in stays(page) if stay[1] == "length"], lambda ended: len(ended) == 40)
    eventually(lambda: page.inner_text(".queue >> nth=0"), lambda text: "Queue: empty" in text)


def test_a_switch_to_static_batching_leaves_slots_empty_while_requests_wait(
    page: Any, demo_path: Path, picture: Picture
) -> None:
    with Stage(demo_path, num_replicas=1, **ENGINE) as stage:
        page.goto(stage.url)
        page.select_option("#window", "15")
        page.wait_for_selector(".replica")
        page.click("#demo")
        eventually(lambda: stays(page), lambda found: len(found) >= 8)
        assert "bubbles 0 %" in page.inner_text(".head")
        page.select_option(".switch [name=strategy]", "static")
        page.click(".switch button")
        page.wait_for_selector(".told:has-text('in force on 1 replica')")
        page.wait_for_selector(".head:has-text('static, fcfs')")
        bubbles = lambda: int(page.inner_text(".head [data-of=bubbles] .value"))  # noqa: E731
        eventually(bubbles, lambda share: share >= 10)
        picture(page, "static", after_s=8)


def test_a_request_has_a_timeline(page: Any, stage: Stage, picture: Picture) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".replica >> nth=1")
    page.click("#demo")
    eventually(lambda: stays(page), lambda found: len(found) > 8)
    page.focus(".replica canvas >> nth=0")
    # What is drawn is a moment behind what has come.
    eventually(lambda: page.keyboard.press("ArrowDown") or page.is_visible("#request-cancel"))
    text = page.inner_text("#request")
    assert "queue" in text
    eventually(lambda: "gaps between tokens" in page.inner_text("#request"))
    counts = page.evaluate("""async () => {
        const { history } = await import("/page/live.js");
        const stays = history.replicas().flatMap((replica) => replica.stays).filter((stay) => stay.first !== null);
        return stays.map((stay) => [history.tokenTimes(stay), stay.use.num_generated_tokens]);
    }""")
    assert all(len(times) == number and times == sorted(times) for times, number in counts)
    assert "replica1, slot " in text
    picture(page, "request", after_s=2)
    page.keyboard.press("Escape")
    assert page.is_hidden("#request")
    page.keyboard.press(" ")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#back-s") == "3 s"


def test_times_of_tokens_never_go_back_where_a_view_came_late(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    times = page.evaluate("""async () => {
        const { History } = await import("/page/history.js");
        const history = new History();
        const use = {
            request_id: "one", slot: 0, arrived_ms: 300, joined_ms: 200, first_token_ms: 150, left_ms: null,
            why_left: "", num_given_tokens: 0, num_generated_tokens: 3,
        };
        const fields = {
            view: ["slots", "waiting", "steps", "reported"], slots: Object.keys(use), waiting: [],
            steps: ["num_steps", "ended_ms"],
        };
        const replicas = [{ replica: "r", state: "serving" }];
        const take = (at, view) =>
            history.take({ at, models: { demo: { replicas, views: [["r", at, view]] } } }, fields);
        take(1100, [[Object.values(use)], [], [3, [150, 80, 10]], []]);
        take(1150, [[], [], [2, [70, 10]], [0, 5, 1]]);
        return history.tokenTimes(history.staysOf("one")[0]);
    }""")
    assert times == [950, 1020, 1090, 1090, 1140]


def test_a_chat_streams(page: Any, stage: Stage) -> None:
    page.goto(f"{stage.url}/#playground")
    page.wait_for_selector("#model option", state="attached")
    page.fill("#max_tokens", "60")
    page.fill("#prompt", "Hello")
    page.evaluate("""() => {
        window.lengths = new Set();
        const note = () => lengths.add(document.querySelector(".message.assistant")?.innerText.length);
        new MutationObserver(note).observe(document.getElementById("messages"), { childList: true, subtree: true });
    }""")
    page.click("#send")
    page.wait_for_selector(".cost")
    assert page.evaluate("lengths.size") > 3, "it grows piece by piece"
    assert "first token after" in page.inner_text(".cost")
    assert "60 tokens" in page.inner_text(".cost")
    assert '"content": "Hello"' in page.inner_text("#code")
    page.click("#as-python")
    assert "OpenAI(base_url=" in page.inner_text("#code")
    compile(page.inner_text("#code"), "code", "exec")


def test_a_decision_shows_the_probability_of_each_answer(page: Any, stage: Stage) -> None:
    page.goto(f"{stage.url}/#playground")
    page.wait_for_selector("#model option", state="attached")
    page.click("#forms summary")
    page.click("#questions-example")
    page.fill("#prompt", "The cat sleeps.")
    page.click("#as-python")
    assert "client.decisions.create(" in page.inner_text("#code")
    compile(page.inner_text("#code"), "code", "exec")
    options = [{"value": "question", "probability": 0.25}, {"value": "statement", "probability": 0.75}]
    answers = [
        {"type": "predicate", "name": None, "probability": 0.875},
        {"type": "choice", "name": None, "choice": "statement", "probabilities": options, "confidence": 0.5},
    ]
    usage = {"input_tokens": 90, "input_tokens_details": {"cached_tokens": 30}}
    sent = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(json={"answers": answers, "usage": usage})

    page.route("**/v1/decisions", answer)
    page.click("#send")
    page.wait_for_selector(".cost")
    assert sent[0]["input"] == "The cat sleeps."
    assert [each["type"] for each in sent[0]["questions"]] == ["predicate", "choice"]
    shown = page.inner_text(".message.assistant").split()
    assert [word for word in shown if word.startswith("0.")] == ["0.875", "0.250", "0.750"]
    assert {"prompt 90 tokens", "cached 30 tokens"} <= set(page.locator(".cost .figure").all_inner_texts())
    page.route("**/v1/decisions", lambda route: route.fulfill(status=400, json={"error": {"message": "too long"}}))
    page.fill("#prompt", "The cat sleeps.")
    page.click("#send")
    page.wait_for_selector(".message.error")
    assert page.inner_text(".message.error") == "too long"


def test_an_answer_has_the_form_of_a_schema_and_calls_a_tool(page: Any, stage: Stage) -> None:
    page.goto(f"{stage.url}/#playground")
    page.wait_for_selector("#model option", state="attached")
    page.click("#forms summary")
    page.fill("#tools", "[{")
    page.wait_for_selector("#forms-error:not(:empty)")
    page.fill("#tools", "")
    page.click("#schema-example")
    page.fill("#max_tokens", "500")  # a simulated model writes much white space
    page.fill("#prompt", "An animal")
    page.click("#send")
    page.wait_for_selector(".cost")
    assert json.loads(page.evaluate("document.querySelector('.message.assistant').firstChild.data")).keys() == {
        "name",
        "legs",
    }
    page.fill("#schema", "")
    page.click("#tools-example")
    pieces = [
        {"id": "call_1", "function": {"name": "get_weather", "arguments": '{"ci'}},
        {"function": {"arguments": 'ty"}'}},
    ]
    events = [{"choices": [{"delta": {"tool_calls": [{"index": 0, **piece}]}}]} for piece in pieces]
    answer = "".join(f"data: {data}\n\n" for data in (*map(json.dumps, events), "[DONE]"))
    # The bundled model calls no tools by itself.
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=answer))
    page.fill("#prompt", "How is the weather?")
    assert '"name": "get_weather"' in page.inner_text("#code")
    page.click("#send")
    page.wait_for_selector(".call")
    assert page.inner_text(".call") == 'get_weather({"city"})'
    page.wait_for_selector(".cost >> nth=1")
    assert "Write the result of get_weather" in page.get_attribute("#prompt", "placeholder")
    page.fill("#prompt", "sunny")
    assert '"role": "tool"' in page.inner_text("#code")
    page.click("#as-python")
    compile(page.inner_text("#code"), "code", "exec")
    page.click("#as-curl")


def test_a_killed_replica_is_lost_gone_and_replaced_and_its_requests_go_on(
    page: Any, demo_path: Path, picture: Picture
) -> None:
    with Stage(demo_path, **ENGINE) as stage:
        page.goto(stage.url)
        page.select_option("#window", "15")
        page.wait_for_selector(".replica >> nth=1")
        page.click("#demo")
        eventually(lambda: stays(page), lambda found: len(found) >= 16)
        stage.kill("replica1")
        page.wait_for_selector(".replica.lost", timeout=5000)
        assert "lost" in page.inner_text(".replica.lost .state")
        picture(page, "lost", after_s=9)
        stage.replace("replica1")
        page.wait_for_selector(".replica.gone")
        page.wait_for_selector(".replica:has-text('replica3')")
        eventually(lambda: [stay for stay in stays(page) if stay[2]], bool)
        moved = {stay[0] for stay in stays(page) if stay[2]}
        lost = {stay[0] for stay in stays(page) if stay[1] == "lost"}
        assert moved & lost, "the same request, linked"


def test_the_live_view_wants_an_admins_key_and_the_playground_any(page: Any, demo_path: Path) -> None:
    keys = [entry(), entry(ADMIN_KEY, "root", admin=True)]
    with Stage(demo_path, num_replicas=1, keys=keys, **ENGINE) as stage:
        page.goto(stage.url)
        page.wait_for_selector("#key-wanted:has-text('administrator')")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#notice:has-text('administrators')")
        page.wait_for_selector("#model option", state="attached")
        page.fill("#key", ADMIN_KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#connection.on")
        page.wait_for_selector(".replica")
        assert page.is_hidden("#notice")
        page.click("#usage summary")
        page.wait_for_selector("#usage td:has-text('no call has ended in this month')")
        page.click("#wanted summary")
        page.wait_for_selector("#wanted tr:has-text('no requests; the number would be 0, but min_replicas is 1')")
        page.reload()
        page.wait_for_selector("#connection.on")
        assert page.evaluate("Object.values(localStorage).length") == 0


def test_a_batch_is_uploaded_and_its_results_come_back(page: Any, demo_path: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "demo", "prompt": "Hello", "max_tokens": 5}}
        for number in range(20)
    ]  # fmt: skip
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    with Stage(demo_path, batches=tmp_path / "batches", **ENGINE) as stage:
        page.goto(f"{stage.url}/#batches")
        page.wait_for_selector("#batches-notice:has-text('no batches yet')")
        page.set_input_files("#batch-file", file)
        page.click("#batch-form button")
        page.wait_for_selector("#batch-list:has-text('20 of 20 done')")
        with page.expect_download() as download:
            page.click("text=Results")
        found = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
        assert {each["custom_id"] for each in found} == {f"line-{number}" for number in range(20)}
        file.write_text("no JSON")
        page.set_input_files("#batch-file", file)
        page.click("#batch-form button")
        page.wait_for_selector(
            "#batch-list .why:has-text('line 1: the line is not valid JSON: expected ident at column 2')"
        )


def test_a_service_without_batches_says_so(page: Any, stage: Stage) -> None:
    page.goto(f"{stage.url}/#batches")
    page.wait_for_selector("#batches-notice:has-text('no batches: its configuration')")


def test_tabs_are_switched_by_keys_and_the_focus_is_seen(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".switch button")
    page.keyboard.press("Tab")
    for key, tab in (
        ("ArrowRight", "playground"), ("ArrowRight", "batches"), ("ArrowRight", "live"), ("ArrowLeft", "batches"),
        ("Home", "live"), ("End", "batches"),
    ):  # fmt: skip
        page.keyboard.press(key)
        focused = page.evaluate("""() => {
            const { id, tabIndex, ariaSelected } = document.activeElement;
            return [id, tabIndex, ariaSelected, getComputedStyle(document.activeElement).outlineStyle];
        }""")
        assert focused == [f"tab-{tab}", 0, "true", "solid"]
        assert page.locator("[role=tabpanel]:visible").get_attribute("id") == tab
        assert page.locator("[role=tab][tabindex='0']").count() == 1
    page.keyboard.press("Home")
    found = set()
    for _ in range(14):  # key, theme, and the view's own controls
        page.keyboard.press("Tab")
        found.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"key", "theme", "demo", "pause", "window", "colour", "back", "SELECT", "CANVAS"} <= found


def test_a_request_is_cancelled_from_its_panel(page: Any, stage: Stage) -> None:
    page.goto(stage.url)
    page.wait_for_selector(".replica >> nth=1")
    page.evaluate("""() => {
        const body = JSON.stringify({ model: "demo", prompt: "Hello", max_tokens: 800, ignore_eos: true });
        fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body });
    }""")
    eventually(lambda: stays(page), bool)
    page.focus(".replica canvas >> nth=0" if seen(page)["replica1"]["stays"] else ".replica canvas >> nth=1")
    eventually(lambda: page.keyboard.press("ArrowDown") or page.is_visible("#request-cancel"))
    cancelled = page.inner_text("#request-rows .mono")
    page.focus("#request-cancel")
    page.keyboard.press("Enter")
    page.wait_for_selector("#request-told:has-text('cancelled')")
    eventually(lambda: stays(page), lambda found: any(stay[0] == cancelled and stay[1] == "abort" for stay in found))
    page.wait_for_selector("#request-cancel", state="hidden")
    page.keyboard.press("Escape")
    assert page.is_hidden("#request")
    eventually(lambda: page.inner_text(".queue >> nth=0"), lambda text: "Queue: empty" in text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_the_system(browser: Any, stage: Stage, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    tab = context.new_page()
    tab.goto(stage.url)
    brightness = tab.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => +a + +b)"
    )
    assert (brightness < 3 * 128) == (scheme == "dark")
    context.close()
