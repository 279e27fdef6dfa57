"""`--set scheduler.max_running=64`: any setting below EngineConfig by its dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from app.config import EngineConfig, leaves
from benchmarks.errors import BenchmarkError
from benchmarks.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `path=value`, its path known to exist."""

    path: str
    value: str | None


def parse_assignments(texts: Iterable[str]) -> tuple[Assignment, ...]:
    """Read `path=value` texts; `none` as a value stands for no value.

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
        *branches, leaf = path.split(".")
        branch = tree
        for name in branches:
            branch = branch.setdefault(name, {})
        branch[leaf] = value
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise BenchmarkError(_refusal(error)) from error


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
    return Assignment(path, None if value.strip().lower() in ("none", "null") else value.strip())


def _refusal(error: ValidationError) -> str:
    first = error.errors()[0]
    known = dict(leaves(EngineConfig))
    parts = [str(part) for part in first["loc"]]
    # Behind a setting's own path pydantic may add which member of a union it tried.
    path = next((".".join(parts[:end]) for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in known), None)
    if path is None:
        return f"{'.'.join(parts)}: {first['msg']}"
    field, given = known[path], first["input"]
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        return f"{path}={given}{did_you_mean(str(given), [str(choice) for choice in choices])}"
    return f"{path}={given}: {first['msg']} ({field.description})"
