"""Collects the ids, log-probabilities and offsets of tokens, and writes them in the formats of OpenAI and vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec

from app.api.prepared_request import AnswerInfo, PreparedRequest, TokenDetailOptions
from app.engine.request import TokenDelta, TokenLogprobs
from app.json_pieces import Json, Rows
from app.text import TokenOffsets

LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent


class TokenLogprob(NamedTuple):
    """A token in the text of a choice. An echoed prompt is part of this text."""

    token_id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt, which no logits predict
    offset: int  # in the choice's text, in characters


@dataclass(slots=True)
class TokenDetails:
    """The details of the tokens of one `ChoiceDelta`."""

    token_ids: tuple[int, ...]  # generated tokens only
    text_logprobs: list[TokenLogprob]  # tokens in the delta's text: first the echoed prompt, then generated tokens
    logprobs: tuple[TokenLogprobs, ...]  # one for each of `token_ids`
    prompt_logprobs: tuple[TokenLogprob, ...]  # the next tokens of the prompt
    token_bytes: dict[int, bytes] = field(default_factory=dict)  # in a stored delta: tokens that no earlier one named

    def named_tokens(self) -> Iterator[int]:
        """Yield the ids of all tokens whose names appear in the answer."""
        for token in chain(self.text_logprobs, self.prompt_logprobs):
            yield token.token_id
            if token.logprobs is not None:
                yield from token.logprobs.top_token_ids

    def joined(self, following: TokenDetails | None) -> TokenDetails:
        """Return these details joined with the details that follow."""
        if following is None:
            return self
        return TokenDetails(
            self.token_ids + following.token_ids,
            self.text_logprobs + following.text_logprobs,
            self.logprobs + following.logprobs,
            self.prompt_logprobs + following.prompt_logprobs,
        )


class LogprobsCollector:
    """Collects the details of one choice, delta by delta. The first delta with details includes an echoed prompt."""

    def __init__(self, prepared: PreparedRequest, options: TokenDetailOptions, index: int) -> None:
        """`index` is the index of the choice's request."""
        tokenizer = prepared.model.tokenizer
        self._detail_options = options
        is_scored = options.echo or options.prompt_logprobs is not None
        self._prompt = prepared.requests[index].prompt_token_ids if is_scored else ()
        self._prompt_text, self._num_added_tokens = prepared.echo(index)
        self._has_echoed = not options.echo
        self._num_prompt_tokens = 0
        self._prompt_offsets = TokenOffsets(tokenizer, skip_special_tokens=False)  # an echo shows special tokens
        self._offsets = TokenOffsets(tokenizer, skip_special_tokens=prepared.skip_special_tokens)

    def push(self, delta: TokenDelta, *, num_tokens: int, has_ended: bool) -> tuple[str, TokenDetails] | None:
        """Return the echoed text to put before the delta's text, and the details of the first `num_tokens` tokens.

        Returns None for a delta without tokens or prompt log-probabilities, unless the delta is the last one.
        """
        if not (num_tokens or has_ended or delta.prompt_logprobs):
            return None
        echoed = "" if self._has_echoed else self._prompt_text
        self._has_echoed = True
        token_ids = delta.token_ids[:num_tokens]
        prompt, text_logprobs = self._prompt_tokens(delta.prompt_logprobs), list[TokenLogprob]()
        if self._detail_options.logprobs is not None:
            text_logprobs += prompt if self._detail_options.echo else ()
            text_logprobs += self._generated_tokens(token_ids, delta.logprobs)
        return echoed, TokenDetails(token_ids, text_logprobs, delta.logprobs[:num_tokens], prompt)

    def _prompt_tokens(self, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprob, ...]:
        """Return the next tokens of the prompt. The first call adds the first token, which has no log-probability."""
        first, most = self._num_prompt_tokens, len(self._prompt_text)
        found = logprobs if first else (None, *logprobs)
        token_ids = self._prompt[first : first + len(found)]
        self._num_prompt_tokens += len(token_ids)
        num_added_tokens = max(0, self._num_added_tokens - first)
        seen = self._prompt_offsets.push(token_ids[num_added_tokens:]) if most else repeat(0)
        offsets: Iterable[int] = chain(repeat(0, num_added_tokens), seen)
        return tuple(
            TokenLogprob(token_id, each, min(offset, most))
            for token_id, each, offset in zip(token_ids, found, offsets, strict=False)
        )

    def _generated_tokens(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> list[TokenLogprob]:
        before = len(self._prompt_text)
        return [
            TokenLogprob(token_id, each, before + offset)
            for token_id, each, offset in zip(token_ids, logprobs, self._offsets.push(token_ids), strict=False)
        ]


class TokenNames:
    """The names of tokens in responses: a token's text, or its bytes if they are not valid UTF-8 on their own."""

    def __init__(self, bytes_of: Callable[[int], bytes], *, are_ids: bool = False) -> None:
        self._bytes_of = bytes_of
        self._are_ids = are_ids
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._are_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return a token's text, or its bytes, regardless of `are_ids`. Two tokens may have the same text."""
        return (self._known.get(token_id) or self._found(token_id))[0]

    def bytes(self, token_id: int) -> list[int]:
        """Return a token's bytes as a shared list, which the caller must not change."""
        return (self._known.get(token_id) or self._found(token_id))[1]

    def _found(self, token_id: int) -> tuple[str, list[int]]:
        found = self._bytes_of(token_id)
        try:
            text = found.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
        max_known_names = 10_000  # for one call; about 2 MB
        if len(self._known) == max_known_names:
            self._known.clear()
        self._known[token_id] = text, list(found)
        return self._known[token_id]


def chat_entry(token: TokenLogprob, names: TokenNames, num_top: int) -> Json:
    """Return the entry of a token in a chat, with the `num_top` likeliest tokens."""

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": names(token_id), "logprob": _finite(logprob), "bytes": names.bytes(token_id)}

    token_id, found, _ = token
    assert found is not None, "chats do not echo prompts"
    top = [entry(*each) for each in list(zip(found.top_token_ids, found.top_logprobs, strict=True))[:num_top]]
    return entry(token_id, found.logprob) | {"top_logprobs": top}


def _logprob(token: TokenLogprob, names: TokenNames, num_top: int) -> float | None:
    return None if token.logprobs is None else _finite(token.logprobs.logprob)


def _top_map(token: TokenLogprob, names: TokenNames, num_top: int) -> dict[str, float] | None:
    """Map the likeliest tokens and the token itself to log-probabilities. A repeated name is replaced by a token id."""
    found = token.logprobs
    if found is None:
        return None
    likely = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[:num_top]
    if token.token_id not in found.top_token_ids[:num_top]:
        likely.append((token.token_id, found.logprob))
    top: dict[str, float] = {}
    for token_id, logprob in likely:
        name = names(token_id)
        top[name if name not in top else f"token_id:{token_id}"] = _finite(logprob)
    return top


Entry = Callable[[TokenLogprob, TokenNames, int], Any]
# An endpoint's format of log-probabilities: lists with one entry for each token, and fields that are always null.
LogprobsForm = Mapping[str, Entry | None]
CHAT_LOGPROBS: LogprobsForm = {"content": chat_entry, "refusal": None}
COMPLETION_LOGPROBS: LogprobsForm = {
    "tokens": lambda token, names, _: names(token.token_id),
    "token_logprobs": _logprob,
    "top_logprobs": _top_map,
    "text_offset": lambda token, *_: token.offset,
}


def write_logprobs(form: LogprobsForm, tokens: list[TokenLogprob], names: TokenNames, *, num_top: int) -> Json:
    """Return the field `logprobs` for a few tokens, each with the `num_top` likeliest tokens."""
    return {
        name: None if entry is None else [entry(token, names, num_top) for token in tokens]
        for name, entry in form.items()
    }


class PackedLogprobs:
    """The log-probabilities of many tokens, packed into about 15 bytes each until the response is written."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._packed)

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        if tokens:
            self._packed.append(_pack(tokens))

    def rows(self, entry: Entry, names: TokenNames, num_top: int) -> Rows[Json]:
        """Return the entries of all tokens, which are built in small groups."""
        return Rows(lambda: ([entry(token, names, num_top) for token in some] for some in self._some_at_a_time()))

    def written(self, form: LogprobsForm, names: TokenNames, *, num_top: int) -> Json:
        """Return the same field as `write_logprobs`, with `Rows` in place of lists."""
        return {name: None if entry is None else self.rows(entry, names, num_top) for name, entry in form.items()}

    def _some_at_a_time(self) -> Iterator[list[TokenLogprob]]:
        tokens: list[TokenLogprob] = []
        tokens_at_once = 32  # encoding them takes 0.5 ms with 20 top log-probabilities each
        for packed in self._packed:
            tokens += _unpack(packed)
            if len(tokens) >= tokens_at_once:
                yield tokens
                tokens = []
        if tokens:
            yield tokens


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprob]).decode


def _ranked(token: TokenLogprob, names: TokenNames, num_top: int) -> Json | None:
    """Return an entry of `prompt_logprobs` in vLLM's format: a map by token id, which includes the token itself."""
    token_id, found, _ = token
    if found is None:
        return None
    ranked = {token_id: (found.logprob, found.rank)}
    for rank, (each, logprob) in enumerate(zip(found.top_token_ids[:num_top], found.top_logprobs, strict=False), 1):
        ranked.setdefault(each, (logprob, rank))
    return {
        str(each): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(each)}
        for each, (logprob, rank) in ranked.items()
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


@dataclass(slots=True)
class ChoiceDetails:
    """The details of one choice so far."""

    token_ids: array[int] = field(default_factory=lambda: array("l"))
    sum_logprobs: float = 0.0
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    prompt_logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)


class DetailsWriter:
    """Writes the details of one call's choices, in chunks and in full responses."""

    def __init__(
        self, info: AnswerInfo, options: TokenDetailOptions, token_bytes: Callable[[int], bytes], form: LogprobsForm
    ) -> None:
        self._info = info
        self._detail_options = options
        self._form = form
        self._names = TokenNames(token_bytes, are_ids=options.names_are_ids)
        self._kept = [ChoiceDetails() for _ in range(info.num_requests)]

    def keep(self, index: int, details: TokenDetails) -> None:
        """Add the details of a delta to one of the call's requests."""
        kept = self._kept[index]
        kept.token_ids.extend(details.token_ids)
        kept.sum_logprobs += sum([each.logprob for each in details.logprobs])
        kept.logprobs.add(details.text_logprobs)
        if self._detail_options.prompt_logprobs is not None:
            kept.prompt_logprobs.add(details.prompt_logprobs)

    def mean_logprob(self, index: int) -> float:
        """Return the mean log-probability of the generated tokens of a request."""
        kept = self._kept[index]
        return kept.sum_logprobs / len(kept.token_ids) if kept.token_ids else 0.0

    def of_choice(self, index: int) -> Json:
        """Return the detail fields of a finished choice."""
        kept, fields, num_top = self._kept[index], Json(), self._detail_options.logprobs
        if num_top is not None:
            fields["logprobs"] = kept.logprobs.written(self._form, self._names, num_top=num_top)
        if self._detail_options.token_ids:
            fields["token_ids"] = Rows.of(kept.token_ids)
        return fields

    def of_chunk(self, details: TokenDetails | None) -> Json:
        """Return the detail fields of a chunk's choice."""
        fields, num_top = Json(), self._detail_options.logprobs
        if details is None:
            return fields
        if details.text_logprobs and num_top is not None:
            fields["logprobs"] = write_logprobs(self._form, details.text_logprobs, self._names, num_top=num_top)
        if self._detail_options.token_ids:
            fields["token_ids"] = list(details.token_ids)
        return fields

    def of_prompt(self, index: int) -> Json:
        """Return the detail fields of a request's prompt."""
        fields, num_top = Json(), self._detail_options.prompt_logprobs
        if self._detail_options.token_ids:
            fields["prompt_token_ids"] = Rows.of(self._info.prompt_token_ids[index])
        if num_top is not None:
            first_sample = index - index % self._info.num_samples  # the only sample with `prompt_logprobs`
            logprobs = self._kept[first_sample].prompt_logprobs
            fields["prompt_logprobs"] = logprobs.rows(_ranked, self._names, num_top)
        return fields
