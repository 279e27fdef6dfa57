"""`--set scheduler.max_running=64`: any setting below EngineConfig by its dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from app.config import EngineConfig, leaves, mistakes_of
from benchmarks.harness.command import BenchmarkError, did_you_mean


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `path=value`."""

    path: str
    value: str | None


def parse_assignments(texts: Iterable[str]) -> tuple[Assignment, ...]:
    """Read `path=value` texts; `none` stands for no value, where it is no choice itself.

    Raises:
        BenchmarkError: one is no assignment, or there is no such setting.
    """
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Assignment:
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise BenchmarkError(f"--set {text}: write it as path=value, for example scheduler.max_step_tokens=512")
    known = dict(leaves(EngineConfig))
    if path not in known:
        raise BenchmarkError(f"--set {text}: there is no setting {path!r}{did_you_mean(path, known)}")
    is_choice = value in get_args(known[path].annotation)
    return Assignment(path, None if value.lower() in ("none", "null") and not is_choice else value)


def engine_config(base: Mapping[str, object], assignments: Iterable[Assignment]) -> EngineConfig:
    """The engine's settings: `base` by dotted path, then the assignments in their order.

    Raises:
        BenchmarkError: a value is refused; the message says what the setting takes.
    """
    tree: dict[str, Any] = {}
    for path, value in (*base.items(), *((assignment.path, assignment.value) for assignment in assignments)):
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
