"""What a streamed token costs the ingress in Python: from a frame's arrival to the ASGI message with its event.

    python -m benchmarks.service.token_path --streams 64 --pause-ms 10

One process, nothing on a wire: frames go into a real fleet, real requests stream through the real application, and what
they send is thrown away. With a pause before each frame, as a service has it, caches are cold and the same code takes
several times as long; without, it is as fast as it can be. The last line of stdout is one JSON object:

    us_per_token_p50    over frames: time from the frame to the last of its events, for each of its tokens
    us_per_token_best   the same of the fastest frame
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from app.api.endpoints.completions import ServedModel
from app.api.http.routes import build_app
from app.config import ApiConfig
from app.engine.request import ModelFacts, Request, TokenDelta
from app.fleet import Board, Fleet, Frame, Limits, Patience, Report
from app.fleet.dispatch import GroupChooser, make_policy
from app.metrics import RequestMetrics
from app.text import Tokenizer
from benchmarks.harness.options import positive
from benchmarks.harness.percentile import percentile

MODEL_NAME = "simulated"
REPLICA_ID = "replica"
_WARM_UP_FRAMES = 20
_TEXT_TOKENS = range(300, 600)  # text in most vocabularies
_LONG_S = 3600.0
_REPORT = Report(
    group="", num_requests=1, num_background=0, num_staying_background=0, max_requests=10**6, max_running=10**6,
    num_waiting_tokens=0, num_kv_tokens=10**6, speed=1000.0, ended_per_s=1.0, step_age_s=0.0,
)  # fmt: skip


class FedReplica:
    """`Calls` to one replica that says what it is given to say."""

    def __init__(self, board: Board, num_streams: int) -> None:
        self._board = board
        self._num_streams = num_streams
        self.has_all = asyncio.Event()  # requests that are expected
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.request_ids: list[str] = []

    async def serve(self, request: Request) -> None:
        """Take the request and never end it."""
        self._board.order(request.request_id, [REPLICA_ID])
        self._board.placed(request.request_id, REPLICA_ID)
        self.request_ids.append(request.request_id)
        if len(self.request_ids) == self._num_streams:
            self.has_all.set()
        await asyncio.Event().wait()

    async def frames(self, replica_id: str, *, heartbeat_s: float) -> AsyncIterator[Frame]:
        """What `say` was given."""
        while True:
            yield await self._frames.get()

    def say(self, frame: Frame) -> None:
        """Send a frame."""
        self._frames.put_nowait(frame)


class Listener:
    """The clients of all streams: knows when a frame has reached everybody."""

    def __init__(self) -> None:
        self._num_missing = 0
        self._last_at = 0.0
        self._has_all = asyncio.Event()

    def expect(self, num_events: int) -> None:
        """So many events are to come now."""
        self._num_missing = num_events
        self._has_all.clear()

    async def last_at(self) -> float:
        """When the last of them came."""
        await self._has_all.wait()
        return self._last_at

    async def stream(self, app: Any, body: bytes) -> None:
        """One streamed request, to its end."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.Event().wait()  # the client stays
            return messages.pop()

        await app(_SCOPE, receive, self._send)

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self._num_missing -= 1
            if not self._num_missing:
                self._last_at = time.perf_counter()
                self._has_all.set()


_SCOPE = {
    "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions",
    "raw_path": b"/v1/completions", "query_string": b"", "root_path": "", "headers": [],
    "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1024),
}  # fmt: skip


async def measure(model_path: str, *, num_streams: int, num_frames: int, pause_s: float) -> list[float]:
    """Seconds from each frame to the last of its events."""
    board = Board(
        make_policy({"name": "least_loaded"}, random.Random(0)), GroupChooser([]), block_size=16, clock=time.monotonic
    )
    board.set_replicas({REPLICA_ID: None}.keys())
    replica = FedReplica(board, num_streams)
    patience = Patience(silence_s=_LONG_S, step_s=_LONG_S)
    metrics = RequestMetrics([MODEL_NAME]).model(MODEL_NAME)
    fleet = Fleet(replica, board, Limits(max_resumes=0, place_timeout_s=_LONG_S, patience=patience), metrics)
    tokenizer = Tokenizer.load(model_path)
    words = [token for token in _TEXT_TOKENS if _is_text(tokenizer, token)]
    facts = ModelFacts(
        max_model_len=num_frames + _WARM_UP_FRAMES + 16, vocab_size=max(_TEXT_TOKENS) + 1, eos_token_ids=()
    )
    model = ServedModel(name=MODEL_NAME, tokenizer=tokenizer, facts=facts, generate=fleet.generate, created=0)
    listener = Listener()
    app = build_app([model], ApiConfig(), _is_ready)
    body = {"prompt": [_TEXT_TOKENS[0]], "max_tokens": num_frames + _WARM_UP_FRAMES + 1, "stream": True}
    streams = [asyncio.create_task(listener.stream(app, json.dumps(body).encode())) for _ in range(num_streams)]
    await replica.has_all.wait()
    gc.collect()
    gc.disable()
    try:
        seconds = [
            await _one_frame(replica, listener, number, pause_s, words)
            for number in range(num_frames + _WARM_UP_FRAMES)
        ]
    finally:
        gc.enable()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        fleet.close()
    return seconds[_WARM_UP_FRAMES:]


async def _one_frame(
    replica: FedReplica, listener: Listener, number: int, pause_s: float, words: Sequence[int]
) -> float:
    """Send a frame with a token for everybody and wait until they all have heard it."""
    source = random.Random(number)
    deltas = [TokenDelta(request_id, (source.choice(words),)) for request_id in replica.request_ids]
    await asyncio.sleep(pause_s)
    listener.expect(len(deltas))
    began_at = time.perf_counter()
    replica.say(Frame(number, _REPORT, tuple(deltas)))
    return await listener.last_at() - began_at


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether the token makes an event by itself: half a character does not, nor does what is not shown."""
    text = tokenizer.token_text(token_id)
    return text.isascii() and text != "" and token_id not in tokenizer.special_token_ids


async def _is_ready() -> bool:
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    seconds = asyncio.run(
        measure(given.model, num_streams=given.streams, num_frames=given.frames, pause_s=given.pause_ms / 1000)
    )
    us_per_token = [1e6 * each / given.streams for each in seconds]
    middle = percentile(us_per_token, 50)
    assert middle is not None, "at least one frame was measured"
    line = {
        "us_per_token_p50": round(middle, 2),
        "us_per_token_best": round(min(us_per_token), 2),
        "streams": given.streams,
        "pause_ms": given.pause_ms,
    }
    print(json.dumps(line), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service.token_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="at once")
    parser.add_argument("--frames", type=positive, default=200, metavar="N")
    parser.add_argument("--pause-ms", type=float, default=0.0, metavar="MS", help="before each frame")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="whose tokenizer; a vocabulary above 600")
    return parser


if __name__ == "__main__":
    sys.exit(main())
