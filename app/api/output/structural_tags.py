"""Structural tags: free text in which what begins with a trigger must go on as one of the caller's structures."""

from __future__ import annotations

from app.api.output.grammars import tag, tags_grammar
from app.api.schemas.requests import StructuralTag
from app.engine.request import Grammar
from app.errors import InvalidRequest


def structural_tag_grammar(given: StructuralTag, param: str) -> Grammar:
    """What begins with one of the triggers is one of the structures. Raises InvalidRequest where they do not match."""
    structures = given.structures
    for number, structure in enumerate(structures):
        if not any(structure.begin.startswith(trigger) for trigger in given.triggers):
            raise InvalidRequest(
                f"{param}.structures[{number}].begin is {structure.begin[:60]!r}, which begins with none of the "
                f"triggers; add its beginning to them",
                param=f"{param}.structures",
            )
    tags = [
        tag(trigger, [structure.begin.removeprefix(trigger), {"schema": number}, structure.end])
        for trigger in dict.fromkeys(given.triggers)
        for number, structure in enumerate(structures)
        if structure.begin.startswith(trigger)
    ]
    idle = set(given.triggers) - {each["trigger"] for each in tags}
    if idle:
        raise InvalidRequest(
            f"{param}.triggers has {min(idle)[:60]!r}, with which no structure begins; leave it out",
            param=f"{param}.triggers",
        )
    return tags_grammar(tags, [(structure.schema_ or {}, False) for structure in structures], param=param)
