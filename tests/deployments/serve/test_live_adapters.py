"""Adapters on a live service: loaded, asked for through two ingresses, on replicas that start later, and unloaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.deployments.conftest import Deployed
from tests.deployments.strikes import replica_pids
from tests.lora import save_adapter
from tests.waiting import eventually


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Path:
    """A folder with two adapters of the bundled model, and one of another base."""
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(demo_path)
    for seed, name in enumerate(("first", "second")):
        save_adapter(folder / name, model, seed=seed, rank=8, size=0.2)
    save_adapter(folder / "wrong", model, targets=("lm_head",))
    return folder


@pytest.fixture
def url(deployed: Deployed, demo_path: Path, adapters: Path) -> Iterator[str]:
    """One replica behind two ingresses, with one adapter in its config."""
    model = {
        "name": "base",
        "adapters": {"first": str(adapters / "first")},
        "engine": {"model": {"path": str(demo_path)}, "cache": {"num_blocks": 256}},
        "replicas": {"num_replicas": 1, "num_cpus": 0.1, "drain_timeout_s": 1},
    }
    with deployed("adapted", {"models": [model], "ingress": {"num_replicas": 2}}) as url:
        yield url


def tokens_of(url: str, model: str) -> Any:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "model": model}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=30)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code


def test_adapters_are_served_everywhere_until_they_are_unloaded(url: str, adapters: Path) -> None:
    base, first = tokens_of(url, "base"), tokens_of(url, "first")
    assert base != first
    wrong = httpx.post(f"{url}/admin/adapters", json={"name": "wrong", "path": str(adapters / "wrong")}, timeout=30)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unsupported_adapter")
    given = {"name": "second", "path": str(adapters / "second")}
    loaded = httpx.post(f"{url}/admin/adapters", json=given, timeout=30)
    assert loaded.status_code == 200, loaded.text
    assert len(loaded.json()["loaded_on"]) == 1
    for _ in range(6):  # through both ingresses
        assert [tokens_of(url, "base"), tokens_of(url, "first")] == [base, first]
        second = tokens_of(url, "second")
        assert second not in (base, first, 404)

    before = replica_pids("adapted", "replica-base")
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: set(replica_pids("adapted", "replica-base")) - set(before), timeout_s=60)
    eventually(lambda: tokens_of(url, "second"), lambda found: found == second, timeout_s=60)
    assert "carousel_adapters_loaded" in httpx.get(f"{url}/metrics", timeout=10).text

    assert httpx.delete(f"{url}/admin/adapters/second", timeout=30).status_code == 200
    assert [tokens_of(url, "second") for _ in range(6)] == [404] * 6
    listed = httpx.get(f"{url}/v1/models", timeout=10).json()["data"]
    assert {each["id"]: each["parent"] for each in listed} == {"base": None, "first": "base"}
