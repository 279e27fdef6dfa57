"""Puts secrets into the prompts of requests of every kind, and searches responses for them. No network here.

A prompt asks the bundled model to repeat a few words, and the model does. Three words are common to all tenants, so
that all prompts share a prefix; eight belong to one secret. Three words in a row are a mark; no two secrets share one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from app.api.schemas.requests import documents_text
from app.usage import Used

Json = dict[str, Any]
Mark = tuple[str, str, str]

COMMON_WORDS = ("apple", "stone", "river")
NUM_SECRET_WORDS = 8
# These words are not English; the model repeats them nevertheless.
_WORDS = tuple(map("".join, product("bdfglmnprstvk", "aeiou", "bdfglmnprstvk", "aeiou", "nrst")))

KINDS = (
    "whole", "stream", "background", "abort", "logprobs", "n", "echo", "prompt_logprobs", "choice", "schema", "tools",
    "reply", "message", "ranking", "documents", "batch",
)  # fmt: skip
KEPT = frozenset(("stream", "choice", "schema", "tools", "reply"))  # kinds that can be asked for as stored streams
GREEDY_TEXT = frozenset(  # kinds with answers whose first text is only the secret
    ("whole", "stream", "background", "logprobs", "reply", "message", "ranking")
)
_CHAT = "chat/completions"


@dataclass(frozen=True, slots=True)
class Secret:
    """The words of one prompt; a batch has several secrets."""

    owner: int
    words: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The sentence that the model should repeat."""
        return " ".join((*COMMON_WORDS, *self.words)) + "."

    @property
    def question(self) -> str:
        return f"Repeat these words: {self.sentence}"

    @property
    def messages(self) -> list[Json]:
        return [{"role": "user", "content": self.question}]


class Secrets:
    """All secrets, found by their marks. An owner is a number."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._owners: dict[Mark, int] = {}

    def new(self, owner: int) -> Secret:
        """Return a secret that shares no three words in a row with another secret."""
        while True:
            words = tuple(self._source.choices(_WORDS, k=NUM_SECRET_WORDS))
            marks = list(_marks(words))
            if len(set(marks)) == len(marks) and not any(mark in self._owners for mark in marks):
                self._owners |= dict.fromkeys(marks, owner)
                return Secret(owner, words)

    def owners_in(self, text: str) -> set[int]:
        """Return the owners of all secrets with a mark in `text`."""
        words = "".join(each if each.isalpha() else " " for each in text).split()
        return {self._owners[mark] for mark in _marks(words) if mark in self._owners}


def _marks(words: Sequence[str]) -> Iterator[Mark]:
    return zip(words, words[1:], words[2:], strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One HTTP request and the secrets in its prompts."""

    number: int
    kind: str
    tenant: str
    salt: str | None
    secrets: tuple[Secret, ...]
    endpoint: str
    body: Json
    leaves_after: int | None = None  # the client disconnects after at least this many bytes

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_kept(self) -> bool:
        """Whether the response is stored, so that its stream outlives the connection."""
        return bool(self.body.get("store"))

    @property
    def conversations(self) -> list[list[Json]]:
        """All conversations that may become prompts; the documents pipeline may reduce the documents to one."""
        if self.kind != "documents":
            return [each.messages for each in self.secrets]
        documents, [secret] = self.body["documents"], self.secrets
        kept = [documents, *([each] for each in documents)]
        return [[{"role": "user", "content": documents_text(each) + secret.question}] for each in kept]


def question(
    kind: str,
    *,
    number: int,
    model: str,
    tenant: str,
    salt: str | None,
    secrets: Sequence[Secret],
    prompt_ids: Sequence[int],
    source: random.Random,
    is_kept: bool = False,
) -> Question:
    """Return a request of this kind. `prompt_ids` is the chat of the first secret as tokens. A batch has two secrets.

    `is_kept` asks for a stored stream without token ids: a stream with token ids fails when its process dies.
    """
    secret = secrets[0]
    is_stream = kind in ("stream", "background", "abort", "logprobs", "reply", "message") or source.random() < 0.5
    chat: Json = {"messages": secret.messages, "max_completion_tokens": 100, "temperature": 0}
    completion: Json = {"prompt": list(prompt_ids), "max_tokens": 80, "temperature": 0}
    ids: Json = {"return_token_ids": True}
    bodies: dict[str, tuple[str, Json]] = {
        "whole": (_CHAT, chat | ids),
        "stream": (_CHAT, chat | ids),
        "abort": (_CHAT, chat | ids),
        "background": (_CHAT, chat | ids | {"service_tier": "flex"}),
        "logprobs": (_CHAT, chat | {"logprobs": True, "top_logprobs": 3}),
        "n": ("completions", completion | ids | {"n": 3, "temperature": 0.9, "seed": source.randrange(2**31)}),
        "echo": ("completions", completion | {"echo": True, "logprobs": 3}),
        "prompt_logprobs": ("completions", completion | {"prompt_logprobs": 2}),
        "choice": (_CHAT, chat | {"structured_outputs": {"choice": [secret.sentence, "none of these"]}}),
        "schema": (_CHAT, chat | {"response_format": {"type": "json_schema", "json_schema": _schema(secret)}}),
        "tools": (_CHAT, chat | {"max_completion_tokens": 200, "tools": [_tool(secret)], "tool_choice": "required"}),
        "reply": ("responses", {"input": secret.question, "max_output_tokens": 100, "temperature": 0, "store": False}),
        "message": ("messages", {"messages": secret.messages, "max_tokens": 100, "temperature": 0}),
        "ranking": ("rerank", _ranking(secret, source)),
        "documents": (_CHAT, chat | ids | {"documents": _ranking(secret, source)["documents"]}),
        "batch": ("batch", {"prompts": [each.messages for each in secrets], "max_tokens": 100, "temperature": 0}),
    }
    endpoint, body = bodies[kind]
    if is_kept:
        is_stream = True
        body = {name: value for name, value in body.items() if name not in ids} | {"store": True}
    is_stream = is_stream and kind not in ("whole", "batch", "prompt_logprobs", "ranking")
    if is_stream:
        body = body | {"stream": True}
        if kind not in ("reply", "message"):
            body = body | {"stream_options": {"include_usage": True}}
    if salt is not None and kind != "reply":
        body = body | {"cache_salt": salt}
    return Question(
        number=number,
        kind=kind,
        tenant=tenant,
        salt=None if kind == "reply" else salt,
        secrets=tuple(secrets),
        endpoint=endpoint,
        body=body | {"model": model},
        leaves_after=source.randrange(1, 6000) if kind == "abort" else None,
    )


def _ranking(secret: Secret, source: random.Random) -> Json:
    """Rank three texts, one equal to the query: with the vectors of another request, a wrong text would be first."""
    others = [" ".join(source.sample(secret.words, k=NUM_SECRET_WORDS)) for _ in range(2)]
    return {"query": secret.sentence, "documents": [*others, secret.sentence], "return_documents": True}


def _schema(secret: Secret) -> Json:
    schema = {
        "type": "object",
        "properties": {"words": {"enum": [secret.sentence]}},
        "required": ["words"],
        "additionalProperties": False,
    }
    return {"name": "words", "schema": schema, "strict": True}


def _tool(secret: Secret) -> Json:
    return {"type": "function", "function": {"name": "say", "parameters": _schema(secret)["schema"]}}


@dataclass(slots=True)
class Heard:
    """The content of an answer, whole or streamed."""

    texts: list[str] = field(default_factory=list)  # the text of each choice, then all other fields with words
    ids: list[list[int]] = field(default_factory=list)  # token ids of prompts and outputs
    around: str = ""  # other events of a Responses stream; their ids and times differ between answers
    num_ends: Counter[int] = field(default_factory=Counter)  # finish reasons, by choice
    cached_tokens: int | None = None
    used: Used = field(default_factory=Used, compare=False)  # the reported usage, summed over all models

    @property
    def first(self) -> str:
        return self.texts[0].strip() if self.texts else ""


def heard(documents: Iterable[Json]) -> Heard:
    """Collect the content of an answer: `documents` is one whole body, or the events of a stream.

    Raises:
        ValueError: a document is an error.
    """
    texts, ids, found = dict[tuple[Any, ...], str](), dict[tuple[Any, ...], list[int]](), Heard()

    def say(key: tuple[Any, ...], text: object) -> None:
        if isinstance(text, str):
            texts[key] = texts.get(key, "") + text

    for document in documents:
        if document.get("error"):
            raise ValueError(f"an error event: {document['error']}")
        _listen_to_usage(found, document)
        if document.get("type") == "response.output_text.delta":
            say(("0 output", 0), document["delta"])
        elif document.get("type", "").startswith("response."):
            found.around += str(document)
        for item in document.get("output", ()):
            say(("0 output", 0), "".join(part.get("text", "") for part in item.get("content", ())))
        for block in _blocks(document):
            say(("0 output", 0), block.get("text"))
        for result in document.get("results", ()):
            if "document" in result:
                say(("0 output", len(texts)), result["document"]["text"])
            for choice in (result.get("response") or {}).get("choices", ()):
                say(("0 output", result["index"]), choice["message"]["content"])
        ids.setdefault(("prompt", 0), []).extend(document.get("prompt_token_ids") or ())
        for choice in document.get("choices", ()):
            place = choice["index"]
            found.num_ends[place] += bool(choice.get("finish_reason"))
            part = choice.get("delta") or choice.get("message") or choice
            say(("0 output", place), part.get("content") if part is not choice else choice.get("text"))
            for each in part.get("tool_calls") or ():
                # A key apart from the text: the number of tokens in an event decides which of the two comes first.
                say(
                    ("0 calls", place),
                    (each["function"].get("name") or "") + (each["function"].get("arguments") or ""),
                )
            ids.setdefault(("output", place), []).extend(choice.get("token_ids") or ())
            ids.setdefault(("prompt", place), []).extend(choice.get("prompt_token_ids") or ())
            for rank, text in _of_logprobs(choice):
                say(("logprobs", place, rank), text)
    found.texts = [texts[key] for key in sorted(texts)]
    found.ids = [ids[key] for key in sorted(ids) if ids[key]]
    return found


def _blocks(document: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the content blocks of an Anthropic message, or the delta in an event of its stream."""
    if document.get("type") == "message":
        return list(document["content"])
    return [document["delta"]] if document.get("type") == "content_block_delta" else []


def _listen_to_usage(found: Heard, document: Mapping[str, Any]) -> None:
    usage = document.get("usage") or (document.get("response") or {}).get("usage") or {}
    if usage:
        # The total over a list of prompts leaves out pipeline steps that did not give the answer.
        answers = [result["response"] for result in document.get("results", ()) if result.get("response")]
        usages = [answer["usage"] for answer in answers] or [usage]
        found.used = sum((_used(part) for each in usages for part in _steps_of(each) or [each]), Used())
    if "cache_read_input_tokens" in usage:
        found.cached_tokens = usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details:
        found.cached_tokens = details["cached_tokens"]


def _steps_of(usage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the pipeline steps that called a model."""
    return [step for step in usage.get("pipeline", {}).get("steps", ()) if "prompt_tokens" in step]


def _used(usage: Mapping[str, Any]) -> Used:
    num_prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    num_output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return Used(num_prompt_tokens=num_prompt, num_output_tokens=num_output)


def _of_logprobs(choice: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield (rank, token text) of all tokens and of their top alternatives: the text of one rank could leak words."""
    logprobs = choice.get("logprobs") or {}
    for entry in logprobs.get("content") or ():
        yield 0, entry["token"]
        yield from ((rank, each["token"]) for rank, each in enumerate(entry["top_logprobs"], start=1))
    yield from ((0, token) for token in logprobs.get("tokens") or ())
    for likeliest in logprobs.get("top_logprobs") or ():
        yield from enumerate(likeliest or (), start=1)
    for entry in choice.get("prompt_logprobs") or ():
        yield from ((10 + rank, each["decoded_token"]) for rank, each in enumerate((entry or {}).values()))


class Prefixes:
    """The cached prefix that earlier requests of one owner explain, in whole blocks."""

    def __init__(self, block_size: int, computed_by: Mapping[str, Sequence[str]]) -> None:
        """`computed_by` maps each requested name to the model and adapters that may compute its prompts."""
        self._block_size = block_size
        self._computed_by = computed_by
        self._seen: dict[tuple[str, str | None, str], Counter[tuple[int, ...]]] = {}

    def add(self, asked: Question, prompts: Iterable[Sequence[int]]) -> None:
        """Record that a request with one or all of these prompts is about to be sent."""
        beginnings = {each for prompt_ids in prompts for each in self._beginnings(prompt_ids)}
        for owner in self._owners(asked):
            self._seen.setdefault(owner, Counter()).update(beginnings)

    def num_explained(self, asked: Question, prompt_ids: Sequence[int]) -> int:
        """Return the number of tokens that earlier requests explain as cached. Call `add` with this request before."""
        # Its own prefix explains "n" and "batch" (equal prefixes at once) and a stored response (computed again).
        num_own = 0 if asked.kind in ("n", "batch") or asked.is_kept else 1
        seen = [self._seen[owner] for owner in self._owners(asked)]
        explained = [
            len(each) for each in self._beginnings(prompt_ids) if any(counted[each] > num_own for counted in seen)
        ]
        return max(explained, default=0)

    def _owners(self, asked: Question) -> list[tuple[str, str | None, str]]:
        """Return the owners of the KV: one tenant, salt and adapter each. A pipeline may use several adapters."""
        return [(asked.tenant, asked.salt, each) for each in self._computed_by[asked.body["model"]]]

    def _beginnings(self, prompt_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        ends = range(self._block_size, len(prompt_ids) + 1, self._block_size)
        return (tuple(prompt_ids[:end]) for end in ends)
