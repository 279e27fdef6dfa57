"""`--set scheduler.max_running=64`: any setting below EngineConfig by its dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from app.config import EngineConfig, branches_of, leaves, names_of
from benchmarks.harness.command import BenchmarkError, did_you_mean


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `path=value`, its path known to exist."""

    path: str
    value: str | None


def parse_assignments(texts: Iterable[str]) -> tuple[Assignment, ...]:
    """Read `path=value` texts; `none` stands for no value, where it is no choice itself.

    Raises:
        BenchmarkError: one is no assignment, or its path is no setting; close names are in the message.
    """
    return tuple(_parse(text) for text in texts)


def engine_config(base: Mapping[str, object], assignments: Iterable[Assignment]) -> EngineConfig:
    """The engine's settings: `base` by dotted path, then the assignments in their order.

    Raises:
        BenchmarkError: a value is refused; the message names the setting and says what it takes.
    """
    tree: dict[str, Any] = {}
    for path, value in (*base.items(), *((assignment.path, assignment.value) for assignment in assignments)):
        _set(tree, path.split("."), value)
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise BenchmarkError(_refusal(error)) from error


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


def _parse(text: str) -> Assignment:
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals:
        raise BenchmarkError(f"--set {text}: write it as path=value, for example scheduler.max_step_tokens=512")
    known = dict(leaves(EngineConfig))
    if path not in known:
        below = [name for name in known if name.startswith(f"{path}.")]
        if below:
            raise BenchmarkError(f"--set {text}: {path} is a branch of the settings; below it are {', '.join(below)}")
        raise BenchmarkError(f"--set {text}: there is no setting {path!r}{did_you_mean(path, known)}")
    value = value.strip()
    is_nothing = value.lower() in ("none", "null") and value not in _choices_of(known[path])
    return Assignment(path, None if is_nothing else value)


def _refusal(error: ValidationError) -> str:
    first = error.errors()[0]
    known = dict(leaves(EngineConfig))
    parts = [str(part) for part in first["loc"]]
    # pydantic adds which kind of a choice by name it was, and which member of a union it tried.
    parts = [part for at, part in enumerate(parts) if part not in _names_at(".".join(parts[:at]))]
    path = next((".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in known), None)
    if path is None:
        return f"{'.'.join(parts)}: {first['msg']}"
    field, given = known[path], first["input"]
    if len(branches_of(field)) > 1:
        return f"{path}: {first['msg'].removeprefix('Value error, ')}"
    choices = _choices_of(field)
    if choices:
        return f"{path}={given}{did_you_mean(str(given), [str(choice) for choice in choices])}"
    return f"{path}={given}: {first['msg']} ({field.description})"


def _names_at(path: str) -> tuple[str, ...]:
    field = dict(leaves(EngineConfig)).get(path)
    return () if field is None else names_of(field)


def _choices_of(field: FieldInfo) -> tuple[Any, ...]:
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
