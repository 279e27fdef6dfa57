"""The messages between ingresses and replicas, and their encoding as bytes.

An ingress sends requests and aborts. A replica sends frames, each with everything that is new since the previous frame.

Messages are encoded with msgpack, which supports only plain values, so bytes from a socket cannot run code. A message
starts with its version and its length. Its fields are encoded by position, and a request's fields by name. A reader
ignores unknown fields and uses defaults for missing fields. Consecutive versions therefore remain compatible if new
fields have a default and are added at the end. Any other change requires a new FRAME_VERSION.

A replica that ignored a request field would generate tokens that the client did not request. A replica therefore lists
its supported fields in its first frame, and an ingress sends a request only to replicas that support all its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from app.engine.request import Request, TokenDelta
from app.engine.snapshot import EngineSnapshot
from app.engine.stats import AWAKE, ChosenBackend, EngineStats, SleepStats
from app.errors import CarouselError, from_plain
from app.fleet.dispatch import PrefixChanges, ReplicaReport
from app.fleet.dispatch.ledger import Count

FRAME_VERSION = 2
# The size of messages is limited because a reader buffers each message until it is complete. A frame grows to about
# this size if its ingress was slow for half a minute and each token carries 20 log-probabilities.
MAX_MESSAGE_BYTES = 1 << 26

_HEADER = struct.Struct(">BI")  # version, number of bytes that follow


class InvalidFrame(ValueError):
    """Raised for bytes that are not a valid message of this version."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a replica's stream. Frames are numbered from 0, so that a lost frame is detected."""

    number: int
    report: ReplicaReport
    deltas: tuple[TokenDelta, ...]  # at most one per request; empty in a heartbeat
    view: EngineSnapshot | None = None  # only while the ingress watches
    prefixes: PrefixChanges | None = None  # changes since the previous frame; all prefixes in the first frame
    known_fields: tuple[str, ...] = ()  # supported request fields, as in `REQUEST_FIELDS`; only in the first frame
    metrics: bytes | None = None  # only in the answer to AskMetrics; encoded by `app.metrics`


class SubmitRequest(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Asks a replica to serve a request. Its deltas arrive in frames; the last delta carries the error, if any."""

    request: Request
    # Tokens that the ingress expects the replica to prefill; None for all prompt tokens and generated tokens.
    num_prefill_tokens: Count | None = None


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks a replica to end a request. A replica ignores unknown requests."""

    request_id: str


class WatchEngine(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Starts or stops views in the frames to this ingress. Only sent to replicas that report `sends_views`."""

    is_watched: bool


class AskMetrics(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Requests the replica's metrics once. Only sent to replicas that report `sends_metrics`."""


Message = SubmitRequest | AbortRequest | WatchEngine | AskMetrics
ReceivedT = TypeVar("ReceivedT", Frame, Message)


def _fields_of(kind: type[Any], prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield prefix + field.name
        hint = hints[field.name]
        for part in get_args(hint) or (hint,):
            if isinstance(part, type) and is_dataclass(part):
                yield from _fields_of(part, f"{prefix}{field.name}.")
            elif isinstance(part, type) and issubclass(part, Enum):
                yield from (f"{prefix}{field.name}={each.value}" for each in part)


def used_fields(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names (as in `REQUEST_FIELDS`) of the request fields that differ from their defaults."""
    for field in fields(value):
        item = getattr(value, field.name)
        if item == field.default:
            continue
        yield prefix + field.name
        if is_dataclass(item):
            yield from used_fields(item, f"{prefix}{field.name}.")
        elif isinstance(item, Enum):
            yield f"{prefix}{field.name}={item.value}"


# The request fields that this version supports. Nested fields contain a dot, and each enumeration value is listed.
REQUEST_FIELDS = frozenset(_fields_of(Request))

# The request fields that are only used to choose a replica. A replica may ignore them.
DISPATCH_FIELDS = frozenset({"group", "preset", "session", "call"})

# The fields that version 418a799 supports. It does not list its fields in the first frame. Never add a field here.
FIRST_REQUEST_FIELDS = frozenset(
    """
    request_id prompt_token_ids sampling sampling.max_tokens sampling.min_tokens sampling.temperature
    sampling.top_k sampling.top_p sampling.min_p sampling.seed sampling.presence_penalty
    sampling.frequency_penalty sampling.repetition_penalty sampling.logit_bias sampling.stop_token_ids
    sampling.ignore_eos sampling.grammar sampling.grammar.kind sampling.grammar.kind=json_schema
    sampling.grammar.kind=regex sampling.grammar.kind=choice sampling.grammar.kind=grammar
    sampling.grammar.kind=text sampling.grammar.kind=tags sampling.grammar.text sampling.grammar.is_lenient
    sampling.grammar.param sampling.grammar.thought sampling.grammar.thought.begin sampling.grammar.thought.end
    sampling.grammar.thought.is_open sampling.grammar.thought.max_tokens sampling.allowed_token_ids
    sampling.bad_words sampling.logprobs sampling.prompt_logprobs sampling.logprob_token_ids generated_token_ids
    prediction_token_ids pooling pooling=last pooling=mean pooling=cls pooling=score second_text_at
    num_scored_tokens cache_salt priority tenant deadline_s group preset is_background session no_queue adapter
    adapter.name adapter.path adapter.digest prefix_at
    """.split()
)


def report_of(
    stats: EngineStats,
    *,
    num_requests: int,
    group: str,
    max_requests: int,
    step_age_s: float,
    weights: int = 0,
    adapters: tuple[str, ...] | None = None,
    sleep: SleepStats = AWAKE,
    backend: ChosenBackend | None = None,
    num_prompt_tokens_of_others: int | None = None,
) -> ReplicaReport:
    """Return a replica's report, built from its engine's statistics and values that the statistics do not include."""
    return ReplicaReport(
        group=group,
        num_requests=num_requests,
        num_background=stats.num_background,
        num_unpreemptible_background=stats.num_unpreemptible_background,
        max_requests=max_requests,
        max_running=stats.max_running,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_kv_tokens=stats.num_blocks // stats.num_layer_groups * stats.block_size,
        tokens_per_s=stats.speed,
        ended_per_s=stats.ended_per_s,
        step_age_s=step_age_s,
        weights=weights,
        adapters=adapters,
        sends_views=True,
        sends_metrics=True,
        state=sleep.state,
        wake_s=sleep.expected_wake_s,
        num_prompt_tokens_of_others=num_prompt_tokens_of_others,
        backend="" if backend is None else backend.name,
        backends_failed={} if backend is None else dict(backend.failed),
        num_free_kv_tokens=stats.num_free_blocks // stats.num_layer_groups * stats.block_size,
        is_short_of_memory=stats.num_blocks > 0 and stats.num_free_blocks < stats.num_running * stats.num_layer_groups,
    )


def encode(message: Frame | Message) -> bytes:
    """Return a message as bytes, with its header."""
    body = _encode(message)
    return _HEADER.pack(FRAME_VERSION, len(body)) + body


class StreamDecoder(Generic[ReceivedT]):
    """Decodes a stream of bytes into a replica's frames or an ingress's messages."""

    def __init__(self, decode: Callable[[memoryview], ReceivedT]) -> None:
        """Use `frame_decoder` or `message_decoder` instead of this constructor."""
        self._decode: Callable[[memoryview], ReceivedT] = decode
        self._begun = bytearray()  # bytes of an incomplete message

    def feed(self, data: bytes) -> list[ReceivedT]:
        """Return the messages that `data` completes. Raises InvalidFrame, after which the stream cannot be used."""
        if self._begun:
            self._begun += data
        received: list[ReceivedT] = []
        start = 0
        with memoryview(self._begun or data) as view:
            while len(view) >= start + _HEADER.size:
                version, length = _HEADER.unpack_from(view, start)
                if version != FRAME_VERSION:
                    raise InvalidFrame(f"received version {version}, but this process reads version {FRAME_VERSION}")
                if length > MAX_MESSAGE_BYTES:
                    raise InvalidFrame(f"received a message of {length:,} bytes; the limit is {MAX_MESSAGE_BYTES:,}")
                end = start + _HEADER.size + length
                if end > len(view):
                    break
                with view[start + _HEADER.size : end] as body:
                    try:
                        received.append(self._decode(body))
                    except msgspec.DecodeError as error:
                        raise InvalidFrame(f"received bytes that are not a valid message: {error}") from error
                start = end
        if self._begun:
            del self._begun[:start]
        elif start < len(data):
            self._begun += data[start:]
        return received


def frame_decoder() -> StreamDecoder[Frame]:
    """Return a decoder for the frames of a replica."""
    return StreamDecoder(_decode_frame)


def message_decoder() -> StreamDecoder[Message]:
    """Return a decoder for the messages of an ingress."""
    return StreamDecoder(_decode_message)


def _plain(value: object) -> object:
    if not isinstance(value, CarouselError):
        raise TypeError(f"a frame can contain plain values and CarouselErrors, but no {type(value).__name__}")
    return value.to_plain()


def _restored(kind: type, plain: object) -> CarouselError:
    if kind is not CarouselError or not isinstance(plain, list):
        raise ValueError(f"a frame cannot contain a {kind.__name__}")
    return from_plain(*plain)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_frame = msgspec.msgpack.Decoder(Frame, dec_hook=_restored).decode
_decode_message = msgspec.msgpack.Decoder(Message).decode
