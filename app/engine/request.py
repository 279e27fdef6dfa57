"""The immutable types of the engine's interface: model info, requests and token deltas."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import structs

from app.errors import CarouselError

MAX_PRIORITY = 100  # priorities go from -100 to 100
MAX_TENANT_LENGTH = 256
MAX_SESSION_LENGTH = 256
MAX_DEADLINE_S = 86_400.0
# Values below these minimums overflow or underflow in the samplers' float32 arithmetic, for instance when logits are
# divided by the temperature. A lower temperature means greedy decoding. A lower top-p, such as 0, is raised to
# MIN_TOP_P, which still leaves only the likeliest token: in any vocabulary, its probability is higher.
MIN_TEMPERATURE, MIN_TOP_P, MIN_REPETITION_PENALTY = 1e-5, 1e-6, 0.01
MAX_GRAMMAR_CHARACTERS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The limits and capabilities of a loaded model, against which requests are checked. Determined at load."""

    max_model_len: int  # maximum number of tokens of one request, prompt and output together
    vocab_size: int  # token ids are 0 <= id < vocab_size
    eos_token_ids: tuple[int, ...]  # any of these tokens ends generation
    embedding_size: int | None = None  # numbers in an embedding, or None if the model has no embeddings
    generates: bool = True  # False for an encoder, which computes each prompt in one step without KV memory
    scores_pairs: bool = False  # True for a cross-encoder, which scores pairs of texts
    labels: tuple[str, ...] = ()  # the labels of a classifier, which returns one score for each label
    pooling: str | None = None  # the `Pooling` of its embeddings, as the model's files declare it
    # Layer groups with sliding-window attention. Each group has its own KV blocks for the last `window_tokens` tokens.
    num_window_groups: int = 0
    window_tokens: int = 0
    # Slots for the states of recurrent layers, and the number of tokens between two snapshots of a long prompt.
    num_state_slots: int = 0
    state_interval_tokens: int = 0

    def __setstate__(self, values: list[Any]) -> None:
        """Restore the fields. If an older version pickled them, the last ones may be missing and get their defaults."""
        all_fields = fields(self)
        for each, value in zip(
            all_fields, (*values, *(each.default for each in all_fields[len(values) :])), strict=True
        ):
            object.__setattr__(self, each.name, value)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> ModelInfo:
        """Return model info from decoded JSON. Raises ValueError if `found` is not valid model info."""
        return msgspec.convert(found, cls)


ModelFacts = ModelInfo  # the name in replicas of version 598b9f6, which an ingress may still call during an update


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-text or stop token
    LENGTH = "length"  # `max_tokens` was reached
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # rejected, expired or failed; see `TokenDelta.error`


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # matches the whole output; in Rust's syntax, without back-references and look-around
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # context-free, in llguidance's dialect of Lark or in llama.cpp's GBNF
    TEXT = "text"  # unconstrained text after a thought
    TAGS = "tags"  # free text with tagged parts that follow a grammar; JSON, see `app/grammar/tags.py`

    @property
    def in_words(self) -> str:
        words = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
        return words.get(self.value, "grammar")


@dataclass(frozen=True, slots=True)
class Thought:
    """Free text between two marks that precedes a constrained output. The model may omit a thought that is not open."""

    begin: str
    end: str
    is_open: bool  # the prompt ends inside the thought
    max_tokens: int | None = None  # after this many tokens, only the end mark may follow


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar for an output, as the client sent it, with at most MAX_GRAMMAR_CHARACTERS characters."""

    kind: GrammarKind
    text: str
    is_lenient: bool = False  # whether a schema's unsupported keywords are ignored instead of rejected
    param: str = "structured_outputs"  # the request field that contained the grammar, for error messages
    thought: Thought | None = None  # the thought that precedes the output


class Pooling(StrEnum):
    """How a text's embedding is computed from its hidden states, or which output of the model's head is returned."""

    LAST = "last"  # the vector of the last token
    MEAN = "mean"  # the mean of the vectors of all tokens
    CLS = "cls"  # the vector of the first token; only for encoders
    SCORE = "score"  # not an embedding: the score of a cross-encoder, or a classifier's score for each label
    LOGIT = "logit"  # like SCORE, but before the function that turns logits into scores

    @property
    def uses_head(self) -> bool:
        """Whether the result comes from the head of a cross-encoder or a classifier."""
        return self in (Pooling.SCORE, Pooling.LOGIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when generation stops. Validated by the API (`app/api/schemas/requests.py`).

    Presence and frequency penalties follow the OpenAI API and count generated tokens. The repetition penalty follows
    the CTRL paper and counts prompt and generated tokens.
    """

    max_tokens: int  # 0 to compute the prompt only
    min_tokens: int = 0
    temperature: float = 1.0  # 0 for greedy decoding, otherwise at least MIN_TEMPERATURE
    top_k: int = 0  # 0 for no limit
    top_p: float = 1.0  # at least MIN_TOP_P
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; the same seed yields the same tokens on any replica
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # at least MIN_REPETITION_PENALTY
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # with a grammar, an end token is then drawn only if the grammar allows no other token
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be drawn; empty for all tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that the output must not contain
    # How many of the likeliest tokens to report for each generated token or prompt token, in addition to its own
    # log-probability. None for no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`, report these tokens instead of the likeliest ones
    top_n_sigma: float = 0.0  # drop tokens this many standard deviations below the greatest logit; 0 for no limit

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or biases change logits before every draw."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def needs_output_history(self) -> bool:
        """Whether a draw depends on the generated tokens directly, and not only through the model's logits."""
        return self.has_penalties or self.grammar is not None or bool(self.bad_words)

    @property
    def ends_at_eos(self) -> bool:
        """Whether an end-of-text token ends the output. An output with a grammar can only end with this token."""
        return not self.ignore_eos or self.grammar is not None


# The fields of `SamplingParams` that remove tokens before a draw. Each has a typical value, which is used to test
# samplers. Its type, integer or float, is the type in which samplers read the field.
FILTERS: Mapping[str, Any] = MappingProxyType({"top_k": 5, "top_p": 0.9, "min_p": 0.1, "top_n_sigma": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter. Each replica loads it from the files at `path`, which must have this digest."""

    name: str  # the name that requests use
    path: str  # folder or hub id
    digest: str  # digest of its files; an adapter with other content is another adapter


class Address(NamedTuple):
    """The host and port at which one of our processes accepts connections, and the secret that clients must send."""

    host: str
    port: int
    secret: str


ALL_BLOCKS = 1 << 31  # more blocks than any request has


class PrefixSource(NamedTuple):
    """Another replica whose KV memory holds more of a request's prefix than the replica that serves the request."""

    address: Address
    num_blocks: int  # number of the prefix's blocks that this other replica is known to hold, or ALL_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `cache_salt` separates clients that must not share KV prefixes.

    If another replica has already generated part of the output, the request includes these tokens. The engine continues
    as if it had drawn them itself (positions, penalties, `min_tokens`, `max_tokens`), but its deltas omit them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()  # fewer than max_tokens
    prediction_token_ids: tuple[int, ...] = ()  # the client's prediction of the output, used for drafts
    pooling: Pooling | None = None  # set for an embedding or a score; `max_tokens` is then 0
    second_text_at: int = 0  # index of the second text's first token in a pair of texts, or 0 for a single text
    num_scored_tokens: int = 0  # prompt tokens, after the first, whose log-probabilities the client already has
    cache_salt: str = ""
    priority: int = 0  # from -MAX_PRIORITY to MAX_PRIORITY; lower values join first, if the policy uses priorities
    tenant: str = ""  # the tenant that is charged for the request; at most MAX_TENANT_LENGTH characters
    deadline_s: float | None = None  # the request must end within this many seconds of its arrival
    group: str = ""  # the requested group of replicas
    preset: str = ""  # the requested preset of settings; the request goes to replicas with this preset
    is_background: bool = False  # the request only uses spare capacity, and is preempted first
    session: str = ""  # requests with the same session go to the same replica if possible
    call: str = ""  # requests with the same call share a prefix, and go to the first one's replica if possible
    no_queue: bool = False  # the request is rejected if it would have to wait for a slot
    adapter: Adapter | None = None  # the LoRA adapter that is applied to the model's weights
    prefix_at: PrefixSource | None = None  # another replica that can send the prefix

    @property
    def length_classes(self) -> tuple[tuple[str | None, int], ...]:
        """The classes for predicting the output length: (tenant, power of two of the prompt's length)."""
        length_class = len(self.prompt_token_ids).bit_length()
        return (self.tenant, length_class), (None, length_class)

    @property
    def prefix_salt(self) -> str:
        """The salt of the request's prefixes. It includes the adapter, because KV depends on the adapter.

        Only requests with equal prefix salts share KV. The first newline separates the adapter's digest from the
        client's salt. Without an adapter, the newline comes first, because a client could otherwise imitate a digest.
        """
        if self.adapter is None:
            return self.cache_salt and f"\n{self.cache_salt}"
        return f"{self.adapter.digest}\n{self.cache_salt}"

    @property
    def may_wait(self) -> bool:
        """Whether the request may wait for a free slot. A request that may not wait is rejected instead."""
        return not (self.no_queue or self.is_background)


class Queued(NamedTuple):
    """The state of the queue when a request arrived."""

    position: int  # number of requests already waiting; a policy may rank the new request before some of them
    estimated_wait_s: float
    replica_id: str = ""  # the replica at which the request waits
    routing_reason: str = ""  # a few words on why this replica was chosen
    candidate_loads: str = ""  # the loads of all candidates, on one line
    group: str = ""  # the replica's group, in an A/B trial


class EngineTimes(NamedTuple):
    """The times until a request's first token, or until its end if it generates nothing."""

    queue_s: float  # from the arrival at the replica to the first step
    prefill_s: float  # from the first step to the first token or the end
    settings: str = ""  # `SchedulerConfig.version` at the time of the first token or the end
    fetch_s: float = 0.0  # the part of `queue_s` spent waiting for the request's prefix (`cache.tiers`)


class TokenLogprobs(NamedTuple):
    """The log-probabilities at one position: the token's own, and those of the likeliest or the requested tokens.

    Values are natural logarithms of the model's own distribution: the log-softmax of its logits in float32, before
    temperature, penalties, biases, bans and filters. The likeliest token's `logprob` equals `top_logprobs[0]` exactly.
    """

    logprob: float
    rank: int  # 1 for the likeliest token
    top_token_ids: tuple[int, ...] = ()  # the likeliest first, or `logprob_token_ids` in their order
    top_logprobs: tuple[float, ...] = ()


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # large enough for any vocabulary


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """A request's new tokens since its previous delta. Only the last delta has a finish reason.

    Between processes, a delta is encoded as an array of its fields, so new fields must come last and have a default.

    A stop or end-of-text token counts as generated and is included in `token_ids`. In the last delta, `stop_token_id`
    is this token if the reason is STOP. Callers that display text must omit it.
    """

    request_id: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: CarouselError | None = None  # set if the reason is ERROR; the stream raises it
    queued: Queued | None = None  # in the first delta of a stream, which may have no tokens yet
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the next prompt tokens; a prompt's first token has none
    embedding: bytes | None = None  # in the last delta, if requested: float32, not normalised
    times: EngineTimes | None = None  # in the delta with the stream's first token
    num_accepted: int = 0  # accepted drafts from the request's prediction, all in `token_ids`
    num_rejected: int = 0  # rejected drafts from the request's prediction
    ignored: tuple[str, ...] = ()  # in the first delta, the locations of the schema keywords that the grammar ignores


class MergedDelta:
    """Merges consecutive deltas of one request. A token takes only four bytes until `delta` is called."""

    def __init__(self, first: TokenDelta, *others: TokenDelta) -> None:
        self._queued, self._ignored = first.queued, first.ignored
        self._times: EngineTimes | None = None
        self._token_ids = array("I")
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_accepted = self._num_rejected = 0
        for delta in (first, *others):
            self.add(delta)

    def add(self, delta: TokenDelta) -> None:
        self._last = delta
        self._times = self._times or delta.times
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._num_accepted += delta.num_accepted
        self._num_rejected += delta.num_rejected

    def delta(self) -> TokenDelta:
        """Return one delta with the content of all added deltas."""
        return structs.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            queued=self._queued,
            ignored=self._ignored,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            times=self._times,
            num_accepted=self._num_accepted,
            num_rejected=self._num_rejected,
        )


UnreadDelta = TokenDelta | MergedDelta  # a request's tokens that have arrived but were not read yet


def with_next(unread: UnreadDelta | None, delta: TokenDelta) -> UnreadDelta:
    """Return `unread` with `delta` appended. A MergedDelta is only created for the second delta, and then extended."""
    if unread is None:
        return delta
    if isinstance(unread, TokenDelta):
        return MergedDelta(unread, delta)
    unread.add(delta)
    return unread


def as_delta(unread: UnreadDelta) -> TokenDelta:
    """Return everything unread as one delta."""
    return unread if isinstance(unread, TokenDelta) else unread.delta()


# The interface between the API and the generator, which is a fleet in production, one engine on a laptop, or a list in
# tests. Closing the iterator aborts the request. If a request is rejected, a CarouselError is raised before any delta.
Generate = Callable[[Request], AsyncIterator[TokenDelta]]
