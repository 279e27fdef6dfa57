"""Walks over the tree of settings: the leaves, the branches and the choices by name."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def leaves(branch: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting below a branch of the tree with its dotted path; `[]` marks a list of branches.

    A choice between kinds of branches is itself a setting, and the parameters of all kinds are settings below it. An
    optional branch is a setting, in addition to the settings in it.
    """
    for name, field in branch.model_fields.items():
        inner = branches_of(field)
        below = f"{path}{name}{'[]' if inner and get_origin(field.annotation) is tuple else ''}"
        if len(inner) != 1 or field.default is None:
            yield below, field
        if len(inner) == 1:
            yield from leaves(inner[0], f"{below}.")
        elif inner:
            parameters = {key: value for kind in inner for key, value in parameters_of(kind).items()}
            yield from ((f"{below}.{key}", value) for key, value in parameters.items())
            for key, value in parameters.items():
                for branch_below in branches_of(value):
                    yield from leaves(branch_below, f"{below}.{key}[].")


def branches_of(field: FieldInfo) -> tuple[type[BaseModel], ...]:
    """Return the branches that a setting may hold: none for a plain value, several for a choice by name or kind."""
    return tuple(branches_within(field.annotation))


def branches_within(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the branches that an annotation contains."""
    if get_origin(annotation) in (tuple, Union, UnionType):
        for inner in get_args(annotation):
            yield from branches_within(inner)
    elif get_origin(annotation) is Annotated:
        yield from branches_within(get_args(annotation)[0])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def choice_of(kind: type[BaseModel]) -> str:
    """Return the name or kind of a branch that is one of several."""
    return str(kind.model_fields[_choice_key(kind)].default)


def parameters_of(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the settings of a branch that is one of several, without its name or kind."""
    return {name: field for name, field in kind.model_fields.items() if name != _choice_key(kind)}


def _choice_key(kind: type[BaseModel]) -> str:
    return "kind" if "kind" in kind.model_fields else "name"


def names_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the names or kinds that a setting accepts if it holds one of several branches, else an empty tuple."""
    kinds = branches_of(field)
    return tuple(map(choice_of, kinds)) if len(kinds) > 1 else ()
