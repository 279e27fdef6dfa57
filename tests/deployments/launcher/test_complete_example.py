"""docs/examples/complete.yaml as `carousel serve` serves it, with the limits of docs/examples/keys.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.disk import cache_folder
from deployments.cli import make_key
from deployments.launcher.checks import checked
from tests.deployments.conftest import free_port
from tests.deployments.launcher.test_launcher import PROJECT, output_until, start_command, stop
from tests.waiting import PATIENCE_S, eventually

EXAMPLES = PROJECT / "docs" / "examples"
CHAT = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0, "max_tokens": 32}
ANSWER = "3 4 5 6 7 8 9."
MAX_CALLS_OF_A_LIMITED_KEY = 100


@dataclass(frozen=True, slots=True)
class Example:
    """The running example, and the keys that it knows."""

    url: str
    keys: Mapping[str, str]  # by the names in docs/examples/keys.yaml
    folder: Path  # the home folder of the service

    def client(self, name: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def ask(self, name: str, model: str, **fields: Any) -> httpx.Response:
        with self.client(name) as client:
            return client.post("/v1/chat/completions", json={"model": model, **CHAT, **fields})


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Example]:
    """The service of both files. Only the port, the hashes and the home folder of the service are those of a test."""
    folder, port = tmp_path_factory.mktemp("home"), free_port()
    keys, text = {}, (EXAMPLES / "keys.yaml").read_text()
    for entry in yaml.safe_load(text):
        key, made = make_key(entry["name"])
        keys[entry["name"]] = key
        text = text.replace(entry["sha256"], yaml.safe_load(made)[0]["sha256"])
    (folder / "keys.yaml").write_text(text)
    process = start_command(
        "docs/examples/complete.yaml", "--port", str(port), "--api-keys", str(folder / "keys.yaml"),
        HOME=str(folder), XDG_CACHE_HOME=str(cache_folder().parent),
    )  # fmt: skip
    try:
        output_until(process, "Stop with Ctrl-C.")
        yield Example(f"http://127.0.0.1:{port}", keys, folder)
    finally:
        stop(process)


def test_the_example_can_be_served_before_anything_in_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    _, mistakes = checked(EXAMPLES / "complete.yaml", is_starting=False)
    assert mistakes == []


def test_no_key_has_a_hash_of_the_example() -> None:
    """Else whoever reads the file could use a service whose owner forgot to replace a hash."""
    hashes = [entry["sha256"] for entry in yaml.safe_load((EXAMPLES / "keys.yaml").read_text())]
    assert hashes == [f"{number:064}" for number in range(1, len(hashes) + 1)]


def test_a_request_without_a_key_is_refused(example: Example) -> None:
    assert httpx.post(f"{example.url}/v1/chat/completions", json={"model": "small", **CHAT}).status_code == 401


@pytest.mark.parametrize("model", ["small", "gpt-4o-mini", "large"])
def test_a_key_opens_both_models(model: str, example: Example) -> None:
    answer = example.ask("team-a", model).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_the_cascade_answers_by_the_model_that_was_sure(example: Example) -> None:
    answer = example.ask("team-a", "careful").json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    [first, *_] = answer["usage"]["pipeline"]["steps"]
    assert (first["kind"], first["model"], first["is_sure"]) == ("cascade", "small", answer["model"] == "small")


def test_the_pipeline_of_documents_keeps_two_and_asks_the_large_model(example: Example) -> None:
    answer = example.ask("team-a", "documents", documents=["Cats sleep.", "Dogs bark.", "Fish swim."]).json()
    [ranked, generated] = answer["usage"]["pipeline"]["steps"]
    assert len(ranked["kept"]) == 2
    assert (generated["model"], answer["model"]) == ("large", "large")


def test_a_batch_of_two_lines_ends_in_the_folder_of_the_example(example: Example) -> None:
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/chat/completions", "body": {"model": model, **CHAT}}
        for model in ("small", "large")
    ]
    upload = {"file": ("night.jsonl", "\n".join(map(json.dumps, lines)))}
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with example.client("team-a") as client:
        file_id = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
        batch_id = client.post("/v1/batches", json={"input_file_id": file_id, **asked}).json()["id"]
        ended = {"completed", "failed", "expired", "cancelled"}
        batch = eventually(lambda: client.get(f"/v1/batches/{batch_id}").json(), lambda found: found["status"] in ended)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        answers = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    messages = [json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in answers]
    assert messages == [ANSWER, ANSWER]
    assert (example.folder / ".local/share/carousel/complete/batches/batches.sqlite3").is_file()


def test_the_limits_of_the_third_key_hold(example: Example) -> None:
    assert example.ask("trial", "large").status_code == 403
    assert example.ask("trial", "small", max_tokens=129).status_code == 400
    answers = (example.ask("trial", "small") for _ in range(MAX_CALLS_OF_A_LIMITED_KEY))
    refused = next(answer for answer in answers if answer.status_code != 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


def test_only_the_admin_sees_the_usage_and_the_metrics(example: Example) -> None:
    assert example.ask("team-a", "large").status_code == 200
    paths = ("/admin/usage?group_by=key,model", "/metrics")
    with example.client("team-a") as client:
        assert [client.get(path).status_code for path in paths] == [403, 403]
    with example.client("ops") as client:
        assert 'model_name="large"' in client.get("/metrics").text
        rows = eventually(lambda: client.get(paths[0]).json()["data"], lambda rows: used(rows, "team-a", "large"))
    assert used(rows, "team-a", "large")[0]["cost"] > 0


def used(rows: list[dict[str, Any]], key: str, model: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["key"], row["model"]) == (key, model)]


def test_the_steps_are_recorded_without_what_users_wrote(example: Example) -> None:
    assert example.ask("team-a", "small").status_code == 200
    steps = example.folder / ".local/share/carousel/complete/steps"
    written = eventually(
        lambda: "".join(map(Path.read_text, steps.glob("*"))), lambda text: "num_prompt_tokens" in text
    )
    assert "prompt_token_ids" not in written
