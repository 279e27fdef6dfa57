"""The file of API keys: what is read, what is refused, and how a change of it comes to hold. No cluster here."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api.auth.keys import KeyRing, NoAuthentication
from app.config import ApiConfig, KeyConfig
from app.errors import Failure, InvalidSetup, Unauthenticated
from deployments.cli import make_key
from deployments.serve import keys_file
from deployments.serve.batches import Batches
from deployments.serve.ingress import Ingress
from deployments.serve.keys_file import Keys
from deployments.serve.settings import read_keys, read_serve_file
from tests.kit.service import KEY, OTHER_KEY, entry
from tests.waiting import until

SERVE_FILE = Path(__file__).parents[3] / "deployments" / "serve.yaml"


def write(path: Path, entries: Any) -> Path:
    path.write_text(yaml.safe_dump(entries))
    return path


def is_known(keys: Keys, key: str) -> bool:
    try:
        keys.authenticator.account_of([(b"authorization", f"Bearer {key}".encode())])
    except Unauthenticated:
        return False
    return True


def test_a_made_key_opens_the_door_that_its_entry_describes(tmp_path: Path) -> None:
    key, line = make_key("team-a")
    path = tmp_path / "keys.yaml"
    path.write_text(f"# ours\n{line}\n")
    keys = Keys(ApiConfig(keys_file=str(path)))
    assert is_known(keys, key)
    assert not is_known(keys, make_key("team-a")[0])
    assert key not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must contain a list of keys"),
        ("[]", "must contain a list of keys"),
        ("alice: secret", "must contain a list of keys"),
        ("- {name: [", "is not valid YAML"),
        ("- {name: sk-plain, sha256: @}", "is not valid YAML; see line 1"),
        ("- name: 2024-13-45", "is not valid YAML: ValueError"),
        ("- name: !!int ''", "is not valid YAML: IndexError"),
        ("- name: !!bool sk-plain", "is not valid YAML: KeyError"),
        ("[" * 1000, "is not valid YAML: RecursionError"),
        ("- {name: alice}", "[0].sha256: got"),
        ("- {name: alice, sha256: sk-plain}", "[0].sha256: sha256 has 8 characters"),
        (f"- {{name: alice, sha256: '{'0' * 64}', max_request: 1}}", "[0].max_request: no such setting"),
        (f"- {{name: a, sha256: '{'0' * 64}'}}\n- {{name: a, sha256: '{'1' * 64}'}}", "have the same name: a"),
        (f"- {{name: a, sha256: '{'0' * 64}'}}\n- {{name: b, sha256: '{'0' * 64}'}}", "have the same sha256"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidSetup) as caught:
        read_keys(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert "sk-plain" not in caught.value.message


def test_a_file_that_is_not_there_is_told_and_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match="does not exist"):
        Keys(ApiConfig(keys_file=str(tmp_path / "nowhere.yaml")))


def test_a_change_of_the_file_holds_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.yaml", [entry(KEY, "alice")])
    keys = Keys(ApiConfig(keys_file=str(path)))
    write(path, [entry(OTHER_KEY, "bob"), entry("third", "carol")])
    keys.refresh()
    assert [is_known(keys, key) for key in (KEY, OTHER_KEY, "third")] == [False, True, True]
    for mistake in (lambda: path.write_text("[]"), lambda: os.unlink(path)):
        mistake()
        with caplog.at_level(logging.ERROR):
            keys.refresh()
        assert "the API keys remain unchanged" in caplog.messages[-1]
        assert [is_known(keys, key) for key in (KEY, OTHER_KEY, "third")] == [False, True, True]


def test_keys_are_replaced_in_the_thread_that_uses_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_file, "LOOK_EVERY_S", 0.001)
    path = write(tmp_path / "keys.yaml", [entry(KEY, "alice")])
    keys, threads = Keys(ApiConfig(keys_file=str(path))), list[int]()

    def look_at_thread(ring: KeyRing, keys: Iterable[KeyConfig]) -> None:
        threads.append(threading.get_ident())
        take(ring, keys)

    take = KeyRing.replace
    monkeypatch.setattr(KeyRing, "replace", look_at_thread)

    async def run() -> None:
        following = asyncio.create_task(keys.follow())
        replace(path, yaml.safe_dump([entry(OTHER_KEY, "bob")]))
        await until(lambda: is_known(keys, OTHER_KEY))
        following.cancel()

    asyncio.run(run())
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("mistake", ["- name: 2024-13-45", "- name: !!int ''", "[" * 1000, "- {name: alice}", "- ]"])
def test_the_follower_survives_any_file_and_a_key_that_is_revoked_later_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.setattr(keys_file, "LOOK_EVERY_S", 0.001)
    path = write(tmp_path / "keys.yaml", [entry(KEY, "alice")])
    keys = Keys(ApiConfig(keys_file=str(path)))

    async def run() -> None:
        following = asyncio.create_task(keys.follow())
        replace(path, mistake)
        await until(lambda: caplog.messages)
        await asyncio.sleep(0.05)
        assert is_known(keys, KEY)
        replace(path, yaml.safe_dump([entry(OTHER_KEY, "bob")]))
        await until(lambda: is_known(keys, OTHER_KEY))
        assert not following.done()
        following.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert not is_known(keys, KEY)
    [message] = caplog.messages
    assert message.startswith("the API keys remain unchanged: ")
    keys.check_health()


def replace(path: Path, text: str) -> None:
    """Write a file that no follower sees half written."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def test_a_file_whose_disk_fails_for_a_moment_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys.yaml", [entry(KEY, "alice")])
    keys = Keys(ApiConfig(keys_file=str(path)))
    write(path, [entry(OTHER_KEY, "bob")])
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Path, "read_text", failing)
        keys.refresh()
        keys.refresh()
        assert is_known(keys, KEY)
    assert caplog.messages == [f"the API keys remain unchanged: {path}: Input/output error"]
    keys.refresh()
    assert is_known(keys, OTHER_KEY)
    assert not is_known(keys, KEY)


def failing(*_: Any, **__: Any) -> str:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_follower_that_cannot_look_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer holds the look for ever; an error of any kind is no look either."""
    monkeypatch.setattr(keys_file, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(keys_file, "MAX_SILENCE_S", 0.1)
    path = write(tmp_path / "keys.yaml", [entry(KEY, "alice")])
    keys = Keys(ApiConfig(keys_file=str(path)))
    keys.check_health()  # it does not follow yet
    monkeypatch.setattr(keys, "changed", failing)

    following = asyncio.create_task(keys.follow())
    await asyncio.sleep(0.2)
    with pytest.raises(Failure, match="the file of API keys has not been read for 0 s"):
        keys.check_health()
    monkeypatch.undo()
    monkeypatch.setattr(keys_file, "LOOK_EVERY_S", 0.001)
    await until(lambda: is_healthy(keys))
    assert not following.done()
    following.cancel()


def is_healthy(keys: Keys) -> bool:
    try:
        keys.check_health()
    except Failure:
        return False
    return True


@pytest.mark.parametrize("deployment", [Ingress, Batches])
def test_the_follower_is_part_of_the_health_check(tmp_path: Path, deployment: Any) -> None:
    process = deployment.__new__(deployment)
    process._keys = Keys(ApiConfig(keys_file=str(write(tmp_path / "keys.yaml", [entry(KEY, "alice")]))))
    process._keys._looked_at = -1e9
    with pytest.raises(Failure, match="has not been read"):
        process.check_health()


def test_without_keys_every_request_is_let_in() -> None:
    assert isinstance(Keys(ApiConfig()).authenticator, NoAuthentication)


@pytest.fixture
def serve_file(tmp_path: Path) -> Any:
    """Writes serve.yaml with another host and other settings of the API."""

    def written(host: str, **api: Any) -> Path:
        document = yaml.safe_load(SERVE_FILE.read_text())
        document["http_options"]["host"] = host
        document["applications"][0]["args"]["api"] = api
        return write(tmp_path / "serve.yaml", document)

    return written


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_other_machines_are_not_let_in_without_keys(serve_file: Any, host: str) -> None:
    with pytest.raises(InvalidSetup, match="without API keys: every machine that can reach this address could use"):
        read_serve_file(serve_file(host))
    assert read_serve_file(serve_file(host, allow_unauthenticated=True)).host == host


def test_keys_that_stand_in_the_settings_are_refused_and_not_shown(serve_file: Any) -> None:
    with pytest.raises(InvalidSetup, match=r"^api\.keys: this setting was removed; .*keys_file") as refusal:
        read_serve_file(serve_file("127.0.0.1", keys=[entry()]))
    assert entry()["sha256"] not in str(refusal.value)


def test_a_key_for_a_model_that_there_is_not_is_told(serve_file: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", [entry(models=["dmeo"])])
    with pytest.raises(InvalidSetup, match="the API key 'alice' allows an unknown model 'dmeo'; the models are demo"):
        read_serve_file(serve_file("127.0.0.1", keys_file=str(path)))


def test_a_budget_that_nothing_could_count_is_told(serve_file: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    path = serve_file("127.0.0.1", keys_file=str(keys))
    write(keys, [entry(money_per_month=5)])
    with pytest.raises(InvalidSetup, match=r"'alice' has money_per_month, but none of its models has a price; set mod"):
        read_serve_file(path)
    document = yaml.safe_load(path.read_text())
    [application] = document["applications"]
    application["args"]["models"][0]["prices"] = {"output": 2}
    write(path, document)
    assert read_serve_file(path).applications["carousel"].models[0].prices.output == 2
    del application["args"]["batches"]
    write(path, document)
    with pytest.raises(InvalidSetup, match=r"'alice' has money_per_month, but usage would be lost in a restart"):
        read_serve_file(path)


def test_a_file_of_keys_lets_other_machines_in_if_it_has_some(serve_file: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", [entry()])
    assert read_serve_file(serve_file("0.0.0.0", keys_file=str(path))).host == "0.0.0.0"
    write(path, [])
    with pytest.raises(InvalidSetup, match="must contain a list of keys"):
        read_serve_file(serve_file("127.0.0.1", keys_file=str(path)))
