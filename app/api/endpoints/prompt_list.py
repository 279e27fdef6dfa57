"""The body of POST /v1/batch: many prompts, and once what they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from app.api.endpoints.batches import Metadata, WebhookRequest
from app.api.handler import RequestHandler, SharedBody
from app.api.request_context import RequestContext
from app.api.schemas.parameters import refuse_unknown
from app.api.schemas.requests import MAX_PROMPTS, Schema, from_validation_error
from app.errors import InvalidRequest
from app.jobs import Json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_OWN_FIELDS = frozenset(("prompts", "async", "stream", "webhook", "metadata"))
# What stands for each prompt where only what they share is looked at.
_STAND_INS: dict[str, Json] = {CHAT: {"messages": [{"role": "user", "content": "?"}]}, COMPLETIONS: {"prompt": "?"}}


def _prompts(value: Any) -> Any:
    """Texts, or conversations; what is in a conversation is found out prompt by prompt."""
    if not isinstance(value, list) or not value:
        raise ValueError("should be a list of texts, or a list of conversations, each a list of messages")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value):,} prompts; at most {MAX_PROMPTS:,} are accepted")
    if not all(isinstance(each, str) for each in value) and not all(isinstance(each, list) for each in value):
        raise ValueError("should hold only texts, or only conversations, each a list of messages")
    return value


class PromptListRequest(Schema):
    """The body of POST /v1/batch.

    Every other field is one of a completion (where the prompts are texts) or of a chat, and is that of all prompts.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    prompts: Annotated[
        list[Any],
        BeforeValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": MAX_PROMPTS,
                        # Of messages; a conversation that is none fails alone, so it is no mistake of the list.
                        "items": {"type": "array", "description": "the messages of a chat"},
                    },
                ]
            }
        ),
    ]
    is_async: bool = Field(False, alias="async")
    stream: bool = False
    webhook: WebhookRequest | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptList:
    """A checked body: which endpoint its prompts are for, and the fields that they share."""

    asked: PromptListRequest
    endpoint: str
    shared: Json
    common: SharedBody  # the same, checked

    @property
    def num_samples(self) -> int:
        """Of all prompts."""
        return len(self.asked.prompts) * self.common.parsed.num_samples

    def bodies(self) -> list[Json]:
        """The body that each prompt would have at the endpoint."""
        return [self.shared | own for own in self.own_bodies()]

    def own_bodies(self) -> list[Json]:
        """What each of these bodies has alone."""
        name = "messages" if self.endpoint == CHAT else "prompt"
        return [{name: prompt} for prompt in self.asked.prompts]


async def prompt_list(body: Mapping[str, Any], handler: RequestHandler, context: RequestContext) -> PromptList:
    """The checked list. Raises InvalidRequest for a mistake that all prompts would share, naming the field."""
    own = {name: value for name, value in body.items() if name in _OWN_FIELDS and value is not None}
    shared = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    if context.is_strict:
        refuse_unknown(own, PromptListRequest)
    try:
        asked = PromptListRequest.model_validate(own)
    except ValidationError as error:
        raise from_validation_error(error) from None
    for name in ("prompt", "messages"):
        if shared.get(name) is not None:
            raise InvalidRequest(f"{name} is for one request; all of a batch's are in prompts", param=name)
    if asked.stream and asked.is_async:
        raise InvalidRequest("a job is not streamed; leave out stream or async", param="stream")
    endpoint = COMPLETIONS if isinstance(asked.prompts[0], str) else CHAT
    stand_in = shared | _STAND_INS[endpoint]
    num_bodies = 1 if asked.is_async else len(asked.prompts)
    common = await handler.check_shared(context, endpoint, stand_in, num_bodies=num_bodies)
    for name in ("webhook", "metadata"):
        if getattr(asked, name) is not None and not asked.is_async:
            raise InvalidRequest(f"{name} is for jobs; send async: true with it", param=name)
    if asked.is_async and common.parsed.deadline_s is not None:
        raise InvalidRequest("a job has all the time of its batch; leave deadline_s out", param="deadline_s")
    return PromptList(asked=asked, endpoint=endpoint, shared=shared, common=common)
