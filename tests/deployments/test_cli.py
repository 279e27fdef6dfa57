"""The command `carousel` in this process: it finds the command and passes the rest on."""

from __future__ import annotations

import hashlib
from importlib import import_module

import pytest
import yaml

from app.config import KeyConfig
from deployments import cli


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_says_its_arguments_under_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: carousel {name} ")


def test_without_a_command_it_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\ncarousel {name} " in printed for name in cli.COMMANDS)


def test_an_unknown_command_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["server", "x"])
    assert ended.value.code == 2
    assert "invalid choice: 'server' (choose from" in capsys.readouterr().err


def test_the_status_of_a_command_is_the_status_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("deployments.bulk.__main__"), "main", lambda rest: len(rest))
    assert cli.main(["bulk", "--input", "a", "--output"]) == 3


def test_a_key_is_shown_with_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "ops", "--admin"]) == 0
    _, key, _, entry = capsys.readouterr().out.splitlines()
    [kept] = [KeyConfig.model_validate(each) for each in yaml.safe_load(entry)]
    assert (kept.name, kept.admin, kept.sha256) == ("ops", True, hashlib.sha256(key.encode()).hexdigest())
