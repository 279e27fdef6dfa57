"""curl: the first commands that a person types, and the format of a stream on the wire."""

from __future__ import annotations

import json

from benchmarks.clients.checks import BASE_URL, MODEL, OUT, expect, ran, run

_JSON = ("-H", "Content-Type: application/json", "-d")
_ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 8}


def health() -> None:
    ran("curl", "-sf", f"{BASE_URL}/health")


def models() -> None:
    listed = json.loads(ran("curl", "-sf", f"{BASE_URL}/v1/models"))
    expect(any(model["id"] == MODEL for model in listed["data"]), listed)


def an_answer() -> None:
    answer = json.loads(ran("curl", "-sf", f"{BASE_URL}/v1/chat/completions", *_JSON, json.dumps(_ASKED)))
    expect(bool(answer["choices"][0]["message"]["content"]), answer)


def a_stream() -> None:
    asked = _ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    printed = ran("curl", "-sfN", "-D", OUT / "headers", f"{BASE_URL}/v1/chat/completions", *_JSON, json.dumps(asked))
    events = [line for line in printed.split("\n\n") if line and not line.startswith(":")]
    expect(all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]", printed)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    expect(len({chunk["id"] for chunk in chunks}) == 1 and chunks[-1]["usage"]["completion_tokens"] > 0, chunks)
    expect("text/event-stream" in (OUT / "headers").read_text().lower(), (OUT / "headers").read_text())


def a_typed_error() -> None:
    status = ("-s", "-o", OUT / "error.json", "-w", "%{http_code}")
    code = ran("curl", *status, f"{BASE_URL}/v1/chat/completions", *_JSON, json.dumps(_ASKED | {"model": "nope"}))
    error = json.loads((OUT / "error.json").read_text())["error"]
    expect(code == "404" and error["code"] == "model_not_found", (code, error))


def a_json_that_is_none() -> None:
    status = ("-s", "-o", OUT / "error.json", "-w", "%{http_code}")
    code = ran("curl", *status, f"{BASE_URL}/v1/chat/completions", *_JSON, "{")
    expect(code == "400" and "error" in json.loads((OUT / "error.json").read_text()), code)


if __name__ == "__main__":
    run(health, models, an_answer, a_stream, a_typed_error, a_json_that_is_none)
