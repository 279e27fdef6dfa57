"""Secrets in the prompts of requests of all kinds, and the search for them in responses. No network here.

A prompt asks the bundled model to repeat a few words, which it does: three that all tenants have in common, so that
their prompts begin alike, and eight of its own. Three words in a row are a mark; no two secrets share one.
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
# Such words are none of English, and the model repeats them all the same.
_WORDS = tuple(map("".join, product("bdfglmnprstvk", "aeiou", "bdfglmnprstvk", "aeiou", "nrst")))

KINDS = (
    "whole", "stream", "background", "abort", "logprobs", "n", "echo", "prompt_logprobs", "choice", "schema", "tools",
    "reply", "message", "ranking", "documents", "batch",
)  # fmt: skip
KEPT = frozenset(("stream", "choice", "schema", "tools", "reply"))  # may be asked for as streams that are kept
GREEDY_TEXT = frozenset(  # nothing but the secret is said first
    ("whole", "stream", "background", "logprobs", "reply", "message", "ranking")
)
_CHAT = "chat/completions"


@dataclass(frozen=True, slots=True)
class Secret:
    """Words that belong to one request."""

    owner: int
    words: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What the model should say."""
        return " ".join((*COMMON_WORDS, *self.words)) + "."

    @property
    def question(self) -> str:
        return f"Repeat these words: {self.sentence}"

    @property
    def messages(self) -> list[Json]:
        return [{"role": "user", "content": self.question}]


class Secrets:
    """All of them, by their marks. An owner is a number."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._owners: dict[Mark, int] = {}

    def new(self, owner: int) -> Secret:
        """A secret that shares no three words in a row with another."""
        while True:
            words = tuple(self._source.choices(_WORDS, k=NUM_SECRET_WORDS))
            marks = list(_marks(words))
            if len(set(marks)) == len(marks) and not any(mark in self._owners for mark in marks):
                self._owners |= dict.fromkeys(marks, owner)
                return Secret(owner, words)

    def owners_in(self, text: str) -> set[int]:
        """The owners of the secrets that a text has a part of."""
        words = "".join(each if each.isalpha() else " " for each in text).split()
        return {self._owners[mark] for mark in _marks(words) if mark in self._owners}


def _marks(words: Sequence[str]) -> Iterator[Mark]:
    return zip(words, words[1:], words[2:], strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One HTTP request with the secrets that are in it."""

    number: int
    kind: str
    tenant: str
    salt: str | None
    secrets: tuple[Secret, ...]
    endpoint: str
    body: Json
    leaves_after: int | None = None  # so many bytes of the answer, at least

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_kept(self) -> bool:
        """Whether its stream outlives its connection."""
        return bool(self.body.get("store"))

    @property
    def conversations(self) -> list[list[Json]]:
        """All that its prompts may be made of: of documents, a pipeline keeps one."""
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
    """A request of this kind; `prompt_ids` are those of the first secret's chat. A batch has two secrets.

    `is_kept`: as a stream that is kept, without the ids of tokens: with them it fails when its process dies.
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
    """Of three texts the query is one: the vectors of another request would put another first."""
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
    """What an answer says, however it came."""

    texts: list[str] = field(default_factory=list)  # of each choice, then whatever else has words
    ids: list[list[int]] = field(default_factory=list)  # of prompts and outputs
    around: str = ""  # other events of a reply, in which ids and times differ from answer to answer
    num_ends: Counter[int] = field(default_factory=Counter)  # finish reasons, by choice
    cached_tokens: int | None = None
    used: Used = field(default_factory=Used, compare=False)  # as its usage says, of all models

    @property
    def first(self) -> str:
        return self.texts[0].strip() if self.texts else ""


def heard(documents: Iterable[Json]) -> Heard:
    """What a whole answer's document, or those of a stream's events, say.

    Raises:
        ValueError: one of them is an error.
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
                # Apart from the text: which of both comes first in an event depends on how many tokens are in it.
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
    """Of an Anthropic message, or the piece of one in a stream's event."""
    if document.get("type") == "message":
        return list(document["content"])
    return [document["delta"]] if document.get("type") == "content_block_delta" else []


def _listen_to_usage(found: Heard, document: Mapping[str, Any]) -> None:
    usage = document.get("usage") or (document.get("response") or {}).get("usage") or {}
    if usage:
        # The sum of a list of prompts leaves out the steps of a pipeline that have not answered.
        answers = [result["response"] for result in document.get("results", ()) if result.get("response")]
        usages = [answer["usage"] for answer in answers] or [usage]
        found.used = sum((_used(part) for each in usages for part in _steps_of(each) or [each]), Used())
    if "cache_read_input_tokens" in usage:
        found.cached_tokens = usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details:
        found.cached_tokens = details["cached_tokens"]


def _steps_of(usage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a pipeline that have asked a model."""
    return [step for step in usage.get("pipeline", {}).get("steps", ()) if "prompt_tokens" in step]


def _used(usage: Mapping[str, Any]) -> Used:
    num_prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    num_output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return Used(num_prompt_tokens=num_prompt, num_output_tokens=num_output)


def _of_logprobs(choice: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The names of tokens, and those of the likeliest of each place, by rank: a leak would be a text in one of them."""
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
    """What of a prompt its own earlier requests explain to be cached: whole blocks of equal beginnings."""

    def __init__(self, block_size: int, computed_by: Mapping[str, Sequence[str]]) -> None:
        """`computed_by`: of each name that requests ask for, the model and adapters that may compute its prompts."""
        self._block_size = block_size
        self._computed_by = computed_by
        self._seen: dict[tuple[str, str | None, str], Counter[tuple[int, ...]]] = {}

    def add(self, asked: Question, prompts: Iterable[Sequence[int]]) -> None:
        """A request is about to be sent, with one of these prompts or all."""
        beginnings = {each for prompt_ids in prompts for each in self._beginnings(prompt_ids)}
        for owner in self._owners(asked):
            self._seen.setdefault(owner, Counter()).update(beginnings)

    def num_explained(self, asked: Question, prompt_ids: Sequence[int]) -> int:
        """Tokens that may be cached, by what was sent so far; this request is among it."""
        # Those send prompts that begin alike at once; what is kept is computed again when its process has died.
        num_own = 0 if asked.kind in ("n", "batch") or asked.is_kept else 1
        seen = [self._seen[owner] for owner in self._owners(asked)]
        explained = [
            len(each) for each in self._beginnings(prompt_ids) if any(counted[each] > num_own for counted in seen)
        ]
        return max(explained, default=0)

    def _owners(self, asked: Question) -> list[tuple[str, str | None, str]]:
        """What shares KV: a tenant's requests of one salt and one adapter. A pipeline may compute with several."""
        return [(asked.tenant, asked.salt, each) for each in self._computed_by[asked.body["model"]]]

    def _beginnings(self, prompt_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        ends = range(self._block_size, len(prompt_ids) + 1, self._block_size)
        return (tuple(prompt_ids[:end]) for end in ends)
