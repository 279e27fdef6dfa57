"""What crosses the engine's border: facts about the model, requests, and token deltas. All frozen."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import structs

from app.errors import CarouselError

MAX_PRIORITY = 100  # priorities go from -100 to 100
MAX_TENANT_LENGTH = 256
MAX_SESSION_LENGTH = 256
MAX_DEADLINE_S = 86_400.0
# Below these, float32 numbers of the samplers overflow or vanish: logits divided by the temperature become infinite.
# A lower temperature means greedy. A lower top-p, such as 0, means this one: the likeliest token of any vocabulary has
# more, so only that one is left.
MIN_TEMPERATURE, MIN_TOP_P, MIN_REPETITION_PENALTY = 1e-5, 1e-6, 0.01
MAX_GRAMMAR_CHARACTERS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model accepts and gives: the numbers that requests are checked against. Measured at load."""

    max_model_len: int  # tokens of prompt and output together that one request may have
    vocab_size: int  # token ids are 0 <= id < vocab_size
    eos_token_ids: tuple[int, ...]  # generation ends at any of these
    embedding_size: int | None = None  # numbers in an embedding; None: the model gives none
    generates: bool = True  # else it reads a prompt as a whole, in one step without KV memory: an encoder
    scores_pairs: bool = False  # it gives a score for a pair of texts, a cross-encoder
    labels: tuple[str, ...] = ()  # of a classifier, which gives a score for each of them
    pooling: str | None = None  # of its embeddings, a `Pooling`, as its files have it
    # Groups of layers that look back a window, each with KV blocks of its own, and the last tokens that those keep.
    num_window_groups: int = 0
    window_tokens: int = 0
    # Slots for the states of recurrent layers, and the distance of the snapshots of a long prompt in tokens.
    num_state_slots: int = 0
    state_interval_tokens: int = 0

    def __setstate__(self, values: list[Any]) -> None:
        """As dataclasses do; what a replica of the version before has pickled lacks the last fields."""
        all_fields = fields(self)
        for each, value in zip(
            all_fields, (*values, *(each.default for each in all_fields[len(values) :])), strict=True
        ):
            object.__setattr__(self, each.name, value)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> ModelInfo:
        """Those that were written as JSON. Raises ValueError if they are none."""
        return msgspec.convert(found, cls)


ModelFacts = ModelInfo  # as replicas of 598b9f6 call it, from which an ingress learns while an update goes on


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-text or stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client has disconnected
    ERROR = "error"  # refused, expired or failed; the delta says why


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole output; Rust's syntax, without back-references and look-around
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # context-free: Lark as llguidance writes it, or llama.cpp's GBNF
    TEXT = "text"  # any text, behind a thought
    TAGS = "tags"  # free text with marked pieces that keep to a form: JSON, described in `app/grammar/tags.py`

    @property
    def in_words(self) -> str:
        words = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
        return words.get(self.value, "grammar")


@dataclass(frozen=True, slots=True)
class Thought:
    """Free text before an output that has a form, between two marks. The model may leave it out unless it is open."""

    begin: str
    end: str
    is_open: bool  # the prompt ends within it
    max_tokens: int | None = None  # after so many the mark at its end is the only thing that may follow


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an output, as the client gave it; at most MAX_GRAMMAR_CHARACTERS characters."""

    kind: GrammarKind
    text: str
    is_lenient: bool = False  # keywords of a schema that cannot be kept are passed over, not refused
    param: str = "structured_outputs"  # the request's field, for error messages
    thought: Thought | None = None  # before the output


class Pooling(StrEnum):
    """Which vector is the embedding of a text."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all tokens'
    CLS = "cls"  # the first token's; only of encoders
    SCORE = "score"  # no embedding: the number that a cross-encoder makes of its prompt, or a classifier for each label
    LOGIT = "logit"  # the same before the function that makes scores of logits

    @property
    def is_of_head(self) -> bool:
        """Whether the head of a cross-encoder or a classifier gives the numbers."""
        return self in (Pooling.SCORE, Pooling.LOGIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when generation stops. Validated where requests enter (`app/api/schemas/requests.py`).

    Penalties follow the OpenAI API (presence, frequency: over generated tokens) and the CTRL paper
    (repetition: over prompt and generated tokens).
    """

    max_tokens: int  # 0: the prompt is computed and nothing is generated
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy; else at least MIN_TEMPERATURE
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # at least MIN_TOP_P
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63; the same seed gives the same tokens anywhere
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # at least MIN_REPETITION_PENALTY
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # of a grammar: not before it must end
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()  # only these may be drawn; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that may not follow one another in the output
    # With the log-probability of each generated token, and of each prompt token, those of so many of the likeliest
    # tokens; None: no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: those of these tokens, in place of the likeliest

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or biases change some logits before every draw."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def needs_output_history(self) -> bool:
        """Whether a draw depends on the generated tokens directly, not only through the model."""
        return self.has_penalties or self.grammar is not None or bool(self.bad_words)

    @property
    def ends_at_eos(self) -> bool:
        """Whether an end-of-text token ends the output. A complete grammar has no other end."""
        return not self.ignore_eos or self.grammar is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter: where each replica finds it, and what it must find there."""

    name: str  # as requests ask for it
    path: str  # folder or hub id
    digest: str  # of its files: another content is another adapter


class Address(NamedTuple):
    """Where a process of ours takes connections, and the secret that opens one."""

    host: str
    port: int
    secret: str


ALL_BLOCKS = 1 << 31  # more than any request has


class PrefixAt(NamedTuple):
    """The replica that has more of a request's beginning in its KV memory than the one that it was sent to."""

    address: Address
    num_blocks: int  # of the beginning, as far as is known, or ALL_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `cache_salt` separates clients that must not share KV prefixes.

    A request that was generated in part by another replica brings those tokens: the engine continues as if it had drawn
    them itself (positions, penalties, `min_tokens`, `max_tokens`), and its deltas hold only new tokens.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()  # fewer than max_tokens
    prediction_token_ids: tuple[int, ...] = ()  # what much of the output may be: drafts are taken from it
    pooling: Pooling | None = None  # set for an embedding; max_tokens is 0
    second_text_at: int = 0  # in a pair of texts, the first token of the second; 0: there is one text
    num_scored_tokens: int = 0  # prompt tokens, after the first, that the client has log-probabilities of
    cache_salt: str = ""
    priority: int = 0  # lower goes first, where the scheduling policy looks at it; -MAX_PRIORITY to MAX_PRIORITY
    tenant: str = ""  # the tenant that is charged for it; at most MAX_TENANT_LENGTH characters
    deadline_s: float | None = None  # it must end within so many seconds of its arrival
    group: str = ""  # of replicas that the client asks for
    preset: str = ""  # of the settings of the replicas that the client asks for
    is_background: bool = False  # it uses only unused capacity, and is preempted first
    session: str = ""  # requests of one session go to the same replica where possible
    call: str = ""  # requests of one call begin alike, and go to the replica of the first where possible
    no_queue: bool = False  # it is refused where it would wait for a slot
    adapter: Adapter | None = None  # what the model computes with beside its own weights
    prefix_at: PrefixAt | None = None  # from where its beginning may be fetched

    @property
    def prefix_salt(self) -> str:
        """Only requests of one prefix salt share KV: keys and values follow from the adapter, too.

        The first line end separates the digest, which has none, from the salt, which the client writes. A salt without
        an adapter has it as well: otherwise a client could write an adapter's digest into it.
        """
        if self.adapter is None:
            return self.cache_salt and f"\n{self.cache_salt}"
        return f"{self.adapter.digest}\n{self.cache_salt}"

    @property
    def may_wait(self) -> bool:
        """Whether it waits for a slot where there is none; others are refused."""
        return not (self.no_queue or self.is_background)


class Queued(NamedTuple):
    """The queue that a request met when it arrived."""

    position: int  # waiting requests before it; a policy may put it before some of them
    estimated_wait_s: float
    replica_id: str = ""  # where it waits
    why_there: str = ""  # in a few words
    loads_there: str = ""  # of all candidates, in the same line
    group: str = ""  # of the replica, in an A/B trial


class EngineTimes(NamedTuple):
    """How long an engine took until a request's first token, or until its end where it generates nothing."""

    queue_s: float  # from its arrival at the replica to its first step
    prefill_s: float  # from there on
    settings: str = ""  # `SchedulerConfig.version` of that moment
    fetch_s: float = 0.0  # of the queue's, it waited for its prefix to be read (`cache.tiers`)


class TokenLogprobs(NamedTuple):
    """The log-probability of the token at one position, and the likeliest tokens there or those that were named.

    Natural logarithms of the model's own distribution: the log-softmax of its logits in float32, before temperature,
    penalties, biases, bans and filters. A token that is the likeliest has exactly the value of `top_logprobs[0]`.
    """

    logprob: float
    rank: int  # 1: no token is likelier
    top_token_ids: tuple[int, ...] = ()  # the likeliest first; or `logprob_token_ids`, in their order
    top_logprobs: tuple[float, ...] = ()


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # of any vocabulary


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request that are new since its last delta. The last delta carries the finish reason.

    It crosses processes by position: new fields go to the end and need a default.

    A stop or end-of-text token is among `token_ids` (it was generated and counts as such); callers that
    show text drop it. `stop_token_id` names it on the last delta when the reason is STOP.
    """

    request_id: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: CarouselError | None = None  # with ERROR; the stream raises it
    queued: Queued | None = None  # on the first delta of a stream, which may come before there are tokens
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, where they are wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens; the first of a prompt has none
    embedding: bytes | None = None  # on the last delta, where one is wanted: float32, not normalised
    times: EngineTimes | None = None  # with the first token of a stream
    num_accepted: int = 0  # tokens of the request's prediction that were drafted and are among `token_ids`
    num_rejected: int = 0  # that were drafted, and something else was drawn
    ignored: tuple[str, ...] = ()  # on the first delta: places of keywords that its grammar does not keep


class MergedDelta:
    """Consecutive deltas of one request that become one. Until then a token takes four bytes here."""

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
        """Take the next one."""
        self._last = delta
        self._times = self._times or delta.times
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._num_accepted += delta.num_accepted
        self._num_rejected += delta.num_rejected

    def delta(self) -> TokenDelta:
        """All of them."""
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


UnreadDelta = TokenDelta | MergedDelta  # what has come of a request and was not read


def with_next(unread: UnreadDelta | None, delta: TokenDelta) -> UnreadDelta:
    """What is unread once `delta` has come, too. Only a second delta makes it a MergedDelta, which grows."""
    if unread is None:
        return delta
    if isinstance(unread, TokenDelta):
        return MergedDelta(unread, delta)
    unread.add(delta)
    return unread


def as_delta(unread: UnreadDelta) -> TokenDelta:
    """All that is unread, as one delta."""
    return unread if isinstance(unread, TokenDelta) else unread.delta()


# The interface between the API and the generator: a fleet in production, one engine on a laptop, a list in tests.
# Closing the iterator aborts the request. Raises a CarouselError before the first delta when not accepted.
Generate = Callable[[Request], AsyncIterator[TokenDelta]]
