"""Adapters on a live service: loaded, asked for through two ingresses, on replicas that start later, and unloaded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.deployments.conftest import SHARED
from tests.deployments.strikes import replica_pids
from tests.waiting import PATIENCE_S, eventually


def tokens_of(url: str, model: str) -> Any:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "model": model}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=PATIENCE_S)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code


def test_adapters_are_served_everywhere_until_they_are_unloaded(shared: str, adapters: Path) -> None:
    url = shared
    base, first = tokens_of(url, "demo"), tokens_of(url, "first")
    assert base != first
    given = {"model": "demo", "name": "wrong", "path": str(adapters / "wrong")}
    wrong = httpx.post(f"{url}/admin/adapters", json=given, timeout=PATIENCE_S)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_adapter")
    given = {"model": "demo", "name": "second", "path": str(adapters / "second")}
    loaded = httpx.post(f"{url}/admin/adapters", json=given, timeout=PATIENCE_S)
    assert loaded.status_code == 200, loaded.text
    assert len(loaded.json()["loaded_on"]) == 1
    for _ in range(6):  # through both ingresses
        assert [tokens_of(url, "demo"), tokens_of(url, "first")] == [base, first]
        second = tokens_of(url, "second")
        assert second not in (base, first, 404)

    before = replica_pids(SHARED, "replica-demo")
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: set(replica_pids(SHARED, "replica-demo")) - set(before))
    eventually(lambda: tokens_of(url, "second"), lambda found: found == second)
    assert "carousel_adapters_loaded" in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text

    assert httpx.delete(f"{url}/admin/adapters/second", timeout=PATIENCE_S).status_code == 200
    assert [tokens_of(url, "second") for _ in range(6)] == [404] * 6
    listed = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert (parents["demo"], parents["first"], parents.get("second")) == (None, "demo", None)
