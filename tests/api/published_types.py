"""Checks an answer against the models that the packages `openai` and `anthropic` publish."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

# What the published models lack. Everything else that they lack is a mistake of ours.
MORE = {
    # of the APIs themselves, but not of their models
    "Logprob.bytes", "LogprobTopLogprob.bytes", "Response.store", "ResponseCustomToolCall.status",
    "ChoiceDeltaToolCall.custom",
    "ResponseFunctionCallArgumentsDoneEvent.name",  # of earlier versions
    # of neighbours, which their clients read
    "Choice.stop_reason", "CompletionChoice.stop_reason",  # vLLM's
    "ChatCompletionMessage.reasoning", "ChatCompletionMessage.reasoning_content",  # DeepSeek's and vLLM's
    "ChoiceDelta.reasoning", "ChoiceDelta.reasoning_content",
    "Model.root", "Model.parent", "Model.max_model_len", "Model.permission",  # vLLM's
    "Batch.paused", "Batch.webhook",  # ours
    "SyncCursorPage[Batch].object", "SyncCursorPage[Batch].first_id", "SyncCursorPage[Batch].last_id",
    "SyncCursorPage[FileObject].object", "SyncCursorPage[FileObject].first_id", "SyncCursorPage[FileObject].last_id",
    # of the other API at the same route
    "SyncPage[Model].first_id", "SyncPage[Model].last_id", "SyncPage[Model].has_more", "SyncPage[ModelInfo].object",
    "Model.lifecycle",
    "Model.type", "Model.display_name", "Model.created_at",
    "ModelInfo.object", "ModelInfo.created", "ModelInfo.owned_by", "ModelInfo.root", "ModelInfo.parent",
    "ModelInfo.max_model_len", "ModelInfo.permission",
}  # fmt: skip


def strictly(kind: Any, sent: Any) -> Any:
    """What was sent, as this model, with no value converted and no field beyond its own and `MORE`."""
    written = sent if isinstance(sent, str | bytes) else json.dumps(sent)
    value = _adapter(kind).validate_json(written, strict=True)
    unknown = set(_unknown(value)) - MORE
    assert not unknown, f"the published models have no {sorted(unknown)}"
    return value


def event_of(union: Any, sent: Any) -> Any:
    """An event, as the model of this union that has its type."""
    kinds = get_args(get_args(union)[0])
    [kind] = [each for each in kinds if sent["type"] in get_args(each.model_fields["type"].annotation)]
    return strictly(kind, sent)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _unknown(each)
    elif isinstance(value, BaseModel):
        yield from (f"{type(value).__name__}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
