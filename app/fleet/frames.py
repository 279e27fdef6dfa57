"""What a replica sends to an ingress: one frame for everything that is new since the last frame, and its bytes.

msgpack holds plain values only, so what comes over a socket can run no code. A frame begins with its version and its
length. Fields travel by position: a reader ignores fields that it does not know and takes the default of fields that
are missing. So replicas and ingresses of neighbouring versions understand each other as long as new fields are added
at the end with a default. Any other change needs a new FRAME_VERSION.
"""

from __future__ import annotations

import struct

import msgspec

from app.engine.request import TokenDelta
from app.engine.stats import EngineStats
from app.errors import CarouselError, from_plain
from app.fleet.dispatch import ReplicaReport

FRAME_VERSION = 1

_HEADER = struct.Struct(">BI")  # version, number of bytes that follow


class InvalidFrame(ValueError):
    """Bytes that are no frame, or a frame of another version."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A stream's frames are numbered from 0; a number that is missing means lost tokens."""

    number: int
    report: ReplicaReport
    deltas: tuple[TokenDelta, ...]  # at most one for each request; empty in a heartbeat


def report_of(stats: EngineStats, *, group: str, max_requests: int, step_age_s: float) -> ReplicaReport:
    """A replica's report: its engine's snapshot, and what the snapshot does not have."""
    return ReplicaReport(
        group=group,
        num_requests=stats.num_running + stats.num_waiting,
        num_background=stats.num_background,
        num_staying_background=stats.num_staying_background,
        max_requests=max_requests,
        max_running=stats.max_running,
        num_waiting_tokens=stats.num_waiting_tokens,
        num_kv_tokens=stats.num_blocks * stats.block_size,
        tokens_per_s=stats.speed,
        ended_per_s=stats.ended_per_s,
        step_age_s=step_age_s,
    )


def encode(frame: Frame) -> bytes:
    """A frame as it goes over the socket."""
    body = _encode(frame)
    return _HEADER.pack(FRAME_VERSION, len(body)) + body


class FrameDecoder:
    """Bytes as they come → frames."""

    def __init__(self) -> None:
        self._begun = bytearray()  # of a frame that is not complete yet

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that end within `data`. Raises InvalidFrame."""
        if self._begun:
            self._begun += data
            frames, used = _frames_in(self._begun)
            del self._begun[:used]
            return frames
        frames, used = _frames_in(data)
        if used < len(data):
            self._begun += data[used:]
        return frames


def _frames_in(data: bytes | bytearray) -> tuple[list[Frame], int]:
    """The whole frames at the beginning of `data`, and how many bytes they have."""
    frames, start = [], 0
    with memoryview(data) as view:
        while len(view) >= start + _HEADER.size:
            version, length = _HEADER.unpack_from(view, start)
            if version != FRAME_VERSION:
                raise InvalidFrame(f"a frame of version {version} came; this ingress reads version {FRAME_VERSION}")
            end = start + _HEADER.size + length
            if end > len(view):
                break
            with view[start + _HEADER.size : end] as body:
                frames.append(_decoded(body))
            start = end
    return frames, start


def _decoded(body: memoryview) -> Frame:
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise InvalidFrame(f"what came is no frame: {error}") from error


def _plain(value: object) -> object:
    if not isinstance(value, CarouselError):
        raise TypeError(f"a frame holds plain values and CarouselErrors, not {type(value).__name__}")
    return value.to_plain()


def _restored(kind: type, plain: object) -> CarouselError:
    if kind is not CarouselError or not isinstance(plain, list):
        raise ValueError(f"a frame holds no {kind.__name__}")
    return from_plain(*plain)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(Frame, dec_hook=_restored).decode
