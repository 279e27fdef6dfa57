"""Frames as bytes: msgpack, which holds plain values only, so that whatever comes over a wire can run no code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]

from app.engine.request import FinishReason, Queued, TokenDelta, TokenLogprobs
from app.errors import CarouselError, from_plain
from app.fleet.frame import Frame, Report

_ERROR = 1  # the code of msgpack's extension type that holds an error

_pack = msgpack.Packer(default=lambda value: _packed_error(value), autoreset=True).pack


def encode(frame: Frame) -> bytes:
    """A frame as it goes over the wire; it says itself where it ends."""
    packed: bytes = _pack(frame)
    return packed


class Decoder:
    """Bytes as they come → frames."""

    def __init__(self) -> None:
        # No limit: a frame is as long as the tokens that its reader was too slow for.
        self._unpacker = msgpack.Unpacker(use_list=False, ext_hook=_unpacked_error, max_buffer_size=2**31 - 1)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that end within `data`. Raises ValueError or TypeError for bytes that are no frames."""
        self._unpacker.feed(data)
        for number, report, deltas in self._unpacker:
            yield Frame(number, Report._make(report), tuple([_delta(*plain) for plain in deltas]))


def _delta(
    request_id: str,
    token_ids: tuple[int, ...],
    finish_reason: str | None,
    stop_token_id: int | None,
    num_cached_tokens: int,
    error: CarouselError | None,
    queued: tuple[Any, ...] | None,
    logprobs: tuple[tuple[Any, ...], ...],
    prompt_logprobs: tuple[tuple[Any, ...], ...],
) -> TokenDelta:
    return TokenDelta(
        request_id,
        token_ids,
        None if finish_reason is None else FinishReason(finish_reason),
        stop_token_id,
        num_cached_tokens,
        error,
        None if queued is None else Queued._make(queued),
        tuple(map(TokenLogprobs._make, logprobs)),
        tuple(map(TokenLogprobs._make, prompt_logprobs)),
    )


def _packed_error(error: object) -> msgpack.ExtType:
    if not isinstance(error, CarouselError):
        raise TypeError(f"a frame holds plain values and errors of ours, not {type(error).__name__}")
    return msgpack.ExtType(_ERROR, msgpack.packb(error.to_plain()))


def _unpacked_error(code: int, data: bytes) -> CarouselError:
    if code != _ERROR:
        raise ValueError(f"a frame holds no values of type {code}")
    return from_plain(*msgpack.unpackb(data, use_list=False))
