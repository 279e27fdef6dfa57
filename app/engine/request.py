"""The frozen types that cross the engine's border: model info, requests and token deltas."""

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
# Values below these minimums overflow or underflow in the samplers' float32 arithmetic: logits divided by the
# temperature become infinite. A lower temperature means greedy. A lower top-p, such as 0, is raised to MIN_TOP_P: the
# likeliest token of any vocabulary has a higher probability, so only this token is left.
MIN_TEMPERATURE, MIN_TOP_P, MIN_REPETITION_PENALTY = 1e-5, 1e-6, 0.01
MAX_GRAMMAR_CHARACTERS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The limits and abilities of a loaded model. Requests are checked against them. Measured at load."""

    max_model_len: int  # maximum number of tokens of one request, prompt and output together
    vocab_size: int  # token ids are 0 <= id < vocab_size
    eos_token_ids: tuple[int, ...]  # any of these tokens ends generation
    embedding_size: int | None = None  # numbers in an embedding; None: the model has no embeddings
    generates: bool = True  # False: an encoder, which computes a whole prompt in one step without KV memory
    scores_pairs: bool = False  # True: a cross-encoder, which scores a pair of texts
    labels: tuple[str, ...] = ()  # the labels of a classifier, which returns one score for each label
    pooling: str | None = None  # the `Pooling` of its embeddings, as the model's files declare it
    # Groups of layers with sliding-window attention; each group has its own KV blocks for the last `window_tokens`.
    num_window_groups: int = 0
    window_tokens: int = 0
    # Slots for the states of recurrent layers, and the tokens between two snapshots of a long prompt.
    num_state_slots: int = 0
    state_interval_tokens: int = 0

    def __setstate__(self, values: list[Any]) -> None:
        """Restore the fields as dataclasses do; the last fields may be missing if an older version pickled them."""
        all_fields = fields(self)
        for each, value in zip(
            all_fields, (*values, *(each.default for each in all_fields[len(values) :])), strict=True
        ):
            object.__setattr__(self, each.name, value)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> ModelInfo:
        """Return the model info that was written as JSON. Raises ValueError if `found` is not model info."""
        return msgspec.convert(found, cls)


ModelFacts = ModelInfo  # the name in replicas of 598b9f6, which an ingress still asks during an update


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-text or stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client has disconnected
    ERROR = "error"  # refused, expired or failed; the reason is in `TokenDelta.error`


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # matches the whole output; Rust's syntax, without back-references and look-around
    CHOICE = "choice"  # a JSON list of strings; the output is one of them
    GRAMMAR = "grammar"  # context-free: llguidance's dialect of Lark, or llama.cpp's GBNF
    TEXT = "text"  # any text after a thought
    TAGS = "tags"  # free text with tagged parts that follow a grammar: JSON, described in `app/grammar/tags.py`

    @property
    def in_words(self) -> str:
        words = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
        return words.get(self.value, "grammar")


@dataclass(frozen=True, slots=True)
class Thought:
    """Free text between two marks, before a constrained output. The model may omit a thought that is not open."""

    begin: str
    end: str
    is_open: bool  # the prompt ends inside the thought
    max_tokens: int | None = None  # after this many tokens, only the end mark may follow


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an output, as the client sent it; at most MAX_GRAMMAR_CHARACTERS characters."""

    kind: GrammarKind
    text: str
    is_lenient: bool = False  # unsupported keywords of a schema are ignored, not refused
    param: str = "structured_outputs"  # the request's field, for error messages
    thought: Thought | None = None  # the thought that precedes the output


class Pooling(StrEnum):
    """The vector that represents a text, or the output of a model's head."""

    LAST = "last"  # the vector of the last token
    MEAN = "mean"  # the mean of the vectors of all tokens
    CLS = "cls"  # the vector of the first token; only for encoders
    SCORE = "score"  # no embedding: the score of a cross-encoder, or one score for each label of a classifier
    LOGIT = "logit"  # as SCORE, but before the function that turns logits into scores

    @property
    def uses_head(self) -> bool:
        """Whether the numbers come from the head of a cross-encoder or a classifier."""
        return self in (Pooling.SCORE, Pooling.LOGIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when generation stops. Validated where requests enter (`app/api/schemas/requests.py`).

    Presence and frequency penalties follow the OpenAI API and count generated tokens. The repetition penalty follows
    the CTRL paper and counts prompt and generated tokens.
    """

    max_tokens: int  # 0: the prompt is computed and nothing is generated
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy; any other value is at least MIN_TEMPERATURE
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # at least MIN_TOP_P
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; the same seed gives the same tokens anywhere
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # at least MIN_REPETITION_PENALTY
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # with a grammar: an end token is drawn only where the grammar allows no other token
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # only these may be drawn; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that the output may not contain
    # The number of likeliest tokens to report beside each generated token or each prompt token, with their
    # log-probabilities; None: no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: report these tokens in place of the likeliest ones
    top_n_sigma: float = 0.0  # standard deviations of the logits below the greatest; 0: no limit

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
        """Whether an end-of-text token ends the output. A complete grammar can end in no other way."""
        return not self.ignore_eos or self.grammar is not None


# The fields of `SamplingParams` that remove tokens before a draw, each with a common value by which samplers are tried.
# Samplers read a field as an integer or a float, as its value here.
FILTERS: Mapping[str, Any] = MappingProxyType({"top_k": 5, "top_p": 0.9, "min_p": 0.1, "top_n_sigma": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter: each replica loads the files at `path`, which must have this digest."""

    name: str  # the name that requests use
    path: str  # folder or hub id
    digest: str  # digest of its files: other content is another adapter


class Address(NamedTuple):
    """The host and port at which one of our processes accepts connections, and the secret that a connection needs."""

    host: str
    port: int
    secret: str


ALL_BLOCKS = 1 << 31  # more blocks than any request has


class PrefixSource(NamedTuple):
    """A replica that has more of a request's prefix in its KV memory than the replica that the request is sent to."""

    address: Address
    num_blocks: int  # blocks of the prefix that the replica is known to have, or ALL_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `cache_salt` separates clients that must not share KV prefixes.

    If another replica has generated part of the output, the request contains these tokens. The engine continues as if
    it had drawn them itself (positions, penalties, `min_tokens`, `max_tokens`), and its deltas hold only new tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()  # fewer than max_tokens
    prediction_token_ids: tuple[int, ...] = ()  # the client's guess of the output; drafts are taken from the guess
    pooling: Pooling | None = None  # set for an embedding; max_tokens is then 0
    second_text_at: int = 0  # in a pair of texts, the index of the second text's first token; 0: one text only
    num_scored_tokens: int = 0  # prompt tokens, after the first, whose log-probabilities the client already has
    cache_salt: str = ""
    priority: int = 0  # lower goes first if the scheduling policy uses priorities; -MAX_PRIORITY to MAX_PRIORITY
    tenant: str = ""  # the tenant that is charged for the request; at most MAX_TENANT_LENGTH characters
    deadline_s: float | None = None  # the request must end within this many seconds of its arrival
    group: str = ""  # the group of replicas that the client asks for
    preset: str = ""  # the client asks for replicas with this preset of settings
    is_background: bool = False  # the request uses only unused capacity, and is preempted first
    session: str = ""  # requests of one session go to the same replica if possible
    call: str = ""  # requests of one call share a prefix and go to the replica of the first one if possible
    no_queue: bool = False  # the request is refused if it would wait for a slot
    adapter: Adapter | None = None  # the LoRA adapter that is applied to the model's weights
    prefix_at: PrefixSource | None = None  # another replica that can send the prefix

    @property
    def length_classes(self) -> tuple[tuple[str | None, int], ...]:
        """The classes by which output lengths are predicted: tenant and power of two of the prompt's length."""
        length_class = len(self.prompt_token_ids).bit_length()
        return (self.tenant, length_class), (None, length_class)

    @property
    def prefix_salt(self) -> str:
        """Only requests with equal prefix salts share KV. The salt names the adapter, because KV depends on it.

        The first newline separates the adapter's digest, which contains no newline, from the client's salt. A salt
        without an adapter starts with a newline: otherwise a client could write an adapter's digest into its salt.
        """
        if self.adapter is None:
            return self.cache_salt and f"\n{self.cache_salt}"
        return f"{self.adapter.digest}\n{self.cache_salt}"

    @property
    def may_wait(self) -> bool:
        """Whether the request waits if no slot is free. A request that may not wait is refused."""
        return not (self.no_queue or self.is_background)


class Queued(NamedTuple):
    """The state of the queue when a request arrived."""

    position: int  # number of requests already waiting; a policy may put the new request before some of them
    estimated_wait_s: float
    replica_id: str = ""  # the replica where the request waits
    routing_reason: str = ""  # a few words on why this replica was chosen
    candidate_loads: str = ""  # the loads of all candidates, in one line
    group: str = ""  # the replica's group, in an A/B trial


class EngineTimes(NamedTuple):
    """How long an engine took to a request's first token, or to its end if the request generates nothing."""

    queue_s: float  # from the arrival at the replica to the first step
    prefill_s: float  # from the first step to the first token or the end
    settings: str = ""  # `SchedulerConfig.version` at the time of the first token or the end
    fetch_s: float = 0.0  # the part of `queue_s` in which the request waited for its prefix (`cache.tiers`)


class TokenLogprobs(NamedTuple):
    """The log-probability of the token at one position, and of the likeliest or the requested tokens at this position.

    Values are natural logarithms of the model's own distribution: the log-softmax of its logits in float32, before
    temperature, penalties, biases, bans and filters. The likeliest token has exactly the value of `top_logprobs[0]`.
    """

    logprob: float
    rank: int  # 1: no token is likelier
    top_token_ids: tuple[int, ...] = ()  # the likeliest first; or `logprob_token_ids`, in their order
    top_logprobs: tuple[float, ...] = ()


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # holds an id of any vocabulary


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one request that are new since its last delta. The last delta has the finish reason.

    A delta crosses processes as an array of its fields: new fields go to the end and need a default.

    A stop or end-of-text token counts as generated and is in `token_ids`; callers that show text drop this token.
    `stop_token_id` names it in the last delta if the reason is STOP.
    """

    request_id: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: CarouselError | None = None  # set with ERROR; the stream raises it
    queued: Queued | None = None  # in the first delta of a stream, which may come before any token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the next prompt tokens; a prompt's first token has none
    embedding: bytes | None = None  # in the last delta, if requested: float32, not normalised
    times: EngineTimes | None = None  # in the delta with the first token of a stream
    num_accepted: int = 0  # drafted tokens of the request's prediction that are in `token_ids`
    num_rejected: int = 0  # drafted tokens of the prediction that were not accepted
    ignored: tuple[str, ...] = ()  # in the first delta: locations of the schema keywords that the grammar ignores


class MergedDelta:
    """Consecutive deltas of one request that become one delta. A token takes four bytes until `delta` is called."""

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
        """Append the next delta."""
        self._last = delta
        self._times = self._times or delta.times
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._num_accepted += delta.num_accepted
        self._num_rejected += delta.num_rejected

    def delta(self) -> TokenDelta:
        """Return one delta with the content of all the deltas added."""
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


UnreadDelta = TokenDelta | MergedDelta  # the tokens of a request that have arrived and were not read yet


def with_next(unread: UnreadDelta | None, delta: TokenDelta) -> UnreadDelta:
    """Return `unread` with `delta` appended. A MergedDelta is made only for a second delta, and then extended."""
    if unread is None:
        return delta
    if isinstance(unread, TokenDelta):
        return MergedDelta(unread, delta)
    unread.add(delta)
    return unread


def as_delta(unread: UnreadDelta) -> TokenDelta:
    """Return everything unread as one delta."""
    return unread if isinstance(unread, TokenDelta) else unread.delta()


# The interface between the API and the generator: a fleet in production, one engine on a laptop, a list in tests.
# Closing the iterator aborts the request. A request that is not accepted raises a CarouselError before the first delta.
Generate = Callable[[Request], AsyncIterator[TokenDelta]]
