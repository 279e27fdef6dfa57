"""Parses `--set scheduler.max_running=64`: any setting of EngineConfig by its dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from app.config import EngineConfig, leaves, mistakes_of
from benchmarks.harness.command import BenchmarkError, did_you_mean

Assignments = Mapping[str, str | None]  # values by dotted path of the setting, in the order of the command line


def parse_assignments(texts: Iterable[str]) -> Assignments:
    """Parse texts of the form `path=value`. `none` means no value, unless `none` is a choice of the setting.

    Raises:
        BenchmarkError: a text is not an assignment, or the setting does not exist.
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
    """Return the assignments as texts that `parse_assignments` accepts."""
    return [f"{path}={value}" for path, value in assignments.items()]


def engine_config(settings: Mapping[str, object]) -> EngineConfig:
    """Build the engine's settings from values by dotted path; a later value replaces an earlier one.

    Raises:
        BenchmarkError: a value is invalid; the message names the values that the setting accepts.
    """
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        _set(tree, path.split("."), value)
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise BenchmarkError(mistakes_of(error, EngineConfig)[0]) from error


def _set(branch: dict[str, Any], path: list[str], value: object) -> None:
    """Put a value into the tree. The name of a choice and the parameters of the choice may come in any order."""
    name, *below = path
    held = branch.get(name)
    if not below:
        branch[name] = {**held, "name": value} if isinstance(held, dict) else value
        return
    if not isinstance(held, dict):
        held = branch[name] = {} if held is None else {"name": held}
    _set(held, below, value)
