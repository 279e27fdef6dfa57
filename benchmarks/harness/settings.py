"""`--set scheduler.max_running=64`: any setting below EngineConfig by its dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from app.config import EngineConfig, leaves, mistakes_of
from benchmarks.harness.command import BenchmarkError, did_you_mean

Assignments = Mapping[str, str | None]  # values by the settings' dotted paths, in the order in which they were given


def parse_assignments(texts: Iterable[str]) -> Assignments:
    """Read `path=value` texts; `none` stands for no value, where it is no choice itself.

    Raises:
        BenchmarkError: one is no assignment, or there is no such setting.
    """
    return dict(map(_parse, texts))


def _parse(text: str) -> tuple[str, str | None]:
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise BenchmarkError(f"--set {text}: write it as path=value, for example scheduler.max_step_tokens=512")
    known = dict(leaves(EngineConfig))
    if path not in known:
        raise BenchmarkError(f"--set {text}: there is no setting {path!r}{did_you_mean(path, known)}")
    is_choice = value in get_args(known[path].annotation)
    return path, None if value.lower() in ("none", "null") and not is_choice else value


def told(assignments: Assignments) -> list[str]:
    """As they could be given again."""
    return [f"{path}={value}" for path, value in assignments.items()]


def engine_config(settings: Mapping[str, object]) -> EngineConfig:
    """The engine's settings from values by dotted path, put in their order.

    Raises:
        BenchmarkError: a value is refused; the message says what the setting takes.
    """
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        _set(tree, path.split("."), value)
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise BenchmarkError(mistakes_of(error, EngineConfig)[0]) from error


def _set(branch: dict[str, Any], path: list[str], value: object) -> None:
    """Put a value into the tree. A choice by name and its parameters may come in any order."""
    name, *below = path
    held = branch.get(name)
    if not below:
        branch[name] = {**held, "name": value} if isinstance(held, dict) else value
        return
    if not isinstance(held, dict):
        held = branch[name] = {} if held is None else {"name": held}
    _set(held, below, value)
