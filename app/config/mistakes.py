"""Messages for mistakes in a config. Each mistake is described in one line with its path, its value and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.config.tree import branches_of, branches_within, choice_of, leaves, names_of


def mistakes_of(error: ValidationError, root: type[BaseModel], *, at: str = "") -> list[str]:
    """Return lines such as `models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1`.

    `root` is the branch that was validated, and `at` is its path, which starts each line.
    """
    details = error.errors(include_url=False)
    # If the only entry of a list has a mistake, pydantic also reports that the list is too short.
    parents = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    causes = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in parents]
    return [_in_words(detail, root, at) for detail in causes]


def shown(value: object) -> str:
    """Return the repr of a value, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _in_words(detail: ErrorDetails, root: type[BaseModel], at: str) -> str:
    where = (at + _path(_without_kinds(detail["loc"], root))).lstrip(".")
    if detail["type"] == "extra_forbidden":
        return f"{where}: no such setting{_suggestion(detail['loc'], root)}"
    if detail["type"] == "value_error":  # Carousel's own checks already name the value and the fix
        text = detail["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    text = detail["msg"].replace("Input should be", "must be").replace("Input should", "must")
    return f"{where or 'args'}: got {shown(detail['input'])}; {text[:1].lower()}{text[1:]}"


def _path(location: Iterable[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _without_kinds(location: Iterable[int | str], root: type[BaseModel]) -> list[int | str]:
    """Remove the kinds that pydantic inserts after a choice by name, because config files do not contain them."""
    known, kept = dict(leaves(root)), list[int | str]()
    for part in location:
        choice = known.get(re.sub(r"\[\d+\]", "[]", _path(kept)).lstrip("."))
        if choice is None or part not in names_of(choice):
            kept.append(part)
    return kept


def _suggestion(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    branch: Any = root
    for part in location[:-1]:
        if isinstance(part, int):
            branch = get_args(branch)[0]
        elif isinstance(branch, type) and issubclass(branch, BaseModel):
            field = branch.model_fields[part]
            inner = branches_of(field)
            branch = inner[0] if field.default is None and inner else field.annotation  # an optional branch
        else:  # the name of a kind
            branch = next(kind for kind in branches_within(branch) if choice_of(kind) == part)
    assert issubclass(branch, BaseModel), "only a branch of settings can have an extra field"
    return suggestion(str(location[-1]), branch.model_fields)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, or all known names."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; use one of {', '.join(names)}"
