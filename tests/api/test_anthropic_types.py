"""Every body and event of Anthropic's endpoints is one of the `anthropic` package's own models."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.pagination import SyncPage
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent

from app.engine.request import FinishReason
from app.errors import Overloaded
from app.text import Tokenizer
from app.text.reasoning import MARKS
from tests.api.published_types import event_of, strictly
from tests.api.test_messages import PATH as MESSAGES
from tests.api.test_messages import TOOL, ask
from tests.kit.service import CALL, Service, calling

LENGTH = FinishReason.LENGTH
THOUGHT = "<think>\nHm.\n</think>\n\n3 4."
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("3 4 5.", {}, {}),
    "nothing": ("", {}, {}),
    "length": ("3 4", {"reason": LENGTH}, {}),
    "stop": ("3 4 5.", {}, {"stop_sequences": [" 5"]}),
    "thinking": (THOUGHT, {"marks": MARKS[0]}, {"thinking": {"type": "enabled", "budget_tokens": 90}}),
    "thinking cut": (THOUGHT[:10], {"marks": MARKS[0], "reason": LENGTH}, {}),
    "calls": (f"Well.\n{CALL}\n{CALL}", {}, {"tools": [TOOL]}),
    "call cut": (CALL[:40], {"reason": LENGTH}, {"tools": [TOOL]}),
    "call forced": ('{"a": 1}', {}, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
    "document": ("{}", {}, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_messages(tools_tokenizer: Tokenizer, case: str) -> None:
    text, how, fields = CASES[case]
    service = calling(tools_tokenizer, text, **how)
    whole = strictly(Message, ask(service, **fields).body)
    # A call of the model that follows has its prefix from the cache.
    assert whole.usage.cache_read_input_tokens == (2 if text else 0)
    events = [event for event in ask(service, stream=True, **fields).events if event["type"] != "ping"]
    read = [event_of(RawMessageStreamEvent, event) for event in events]
    assert [each.type for each in read][:: len(read) - 1] == ["message_start", "message_stop"]
    last = read[-2]
    assert (last.delta.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert last.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens


def test_token_counts_and_models(service: Service) -> None:
    strictly(MessageTokensCount, ask(service, path=f"{MESSAGES}/count_tokens").body)
    [model] = strictly(SyncPage[ModelInfo], service.call("GET", "/v1/models").body).data
    strictly(ModelInfo, service.call("GET", f"/v1/models/{model.id}").body)


def test_errors(tokenizer: Tokenizer) -> None:
    full = Service(tokenizer, lambda request: [Overloaded("full")])
    for answer in (ask(full), ask(full, messages=[]), ask(full, model="b")):
        strictly(ErrorResponse, answer.body)
    begun = Service(tokenizer, lambda request: [(20,), Overloaded("full")])
    strictly(ErrorResponse, ask(begun, stream=True).events[-1])
