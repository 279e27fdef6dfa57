"""What hostile grammars cost those who send none: `python -m benchmarks.engine.grammar_attack --model DIR`.

Streams of one engine run with nobody else about, and then again while another client sends one hostile grammar after
the other (`hostile_grammars.py`), each under another cache salt so that none is known. Told are the pauses between the
tokens of a stream. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from app.assembly import build_engine
from app.config import EngineConfig, ModelConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Grammar, GrammarKind, Request, SamplingParams
from app.errors import CarouselError
from app.versions import commit
from benchmarks.engine.hostile_grammars import cases
from benchmarks.harness.errors import BenchmarkError, refused
from benchmarks.harness.machine import cpu_name
from benchmarks.harness.options import positive
from benchmarks.harness.percentile import percentile
from benchmarks.harness.progress import tell

_PROMPT = tuple(range(40, 72))
_HOSTILE_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.grammar_attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--streams", type=positive, default=8, metavar="N", help="honest ones at once (8)")
    parser.add_argument("--seconds", type=positive, default=15, metavar="S", help="of each of the two runs (15)")
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(asyncio.run(measure(given))), flush=True)
    except (BenchmarkError, CarouselError) as error:
        return refused(error)
    return 0


async def measure(given: argparse.Namespace) -> dict[str, object]:
    """The pauses without an attack and with one, and what became of the attack."""
    config = EngineConfig(model=ModelConfig(path=given.model), scheduler=SchedulerConfig(max_running=32))
    engine = build_engine(config)
    _, kind, text = cases()[0]
    await _send_hostile(engine, kind, text, salt="first")  # the vocabulary is read with the first grammar
    alone = await _streams(engine, given.streams, given.seconds)
    tell(f"alone: {alone.to_dict()}")
    attack = asyncio.create_task(_attack(engine))
    attacked = await _streams(engine, given.streams, given.seconds)
    attack.cancel()
    outcomes = await attack
    engine.check_health()
    await asyncio.to_thread(engine.shutdown)
    return {
        "alone": alone.to_dict(),
        "attacked": attacked.to_dict(),
        "hostile": dict(outcomes),
        "model": given.model,
        "streams": given.streams,
        "cpu": cpu_name(),
        "commit": commit(),
    }


@dataclass
class _Pauses:
    """Between the tokens of honest streams."""

    seconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, float | int | None]:
        milliseconds = [1000 * each for each in self.seconds]
        spread = {f"p{share}_ms": percentile(milliseconds, share) for share in (50, 99)}
        rounded = {name: None if value is None else round(value, 2) for name, value in spread.items()}
        return {"tokens": len(milliseconds), **rounded, "max_ms": round(max(milliseconds, default=0.0), 1)}


async def _streams(engine: AsyncEngine, number: int, seconds: float) -> _Pauses:
    pauses, ends_at = _Pauses(), time.perf_counter() + seconds
    await asyncio.gather(*(_stream(engine, index, ends_at, pauses) for index in range(number)))
    return pauses


async def _stream(engine: AsyncEngine, index: int, ends_at: float, pauses: _Pauses) -> None:
    for turn in count():
        if time.perf_counter() >= ends_at:
            return
        sampling = SamplingParams(max_tokens=128, seed=turn, ignore_eos=True)
        request = Request(request_id=f"honest-{index}-{ends_at}-{turn}", prompt_token_ids=_PROMPT, sampling=sampling)
        last_s = None
        async for delta in engine.generate(request):
            now_s = time.perf_counter()
            if delta.token_ids and last_s is not None:
                pauses.seconds.append(now_s - last_s)
            last_s = now_s


async def _attack(engine: AsyncEngine) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with suppress(asyncio.CancelledError):
        for turn in count():
            for name, kind, text in cases():
                outcomes[await _send_hostile(engine, kind, text, salt=f"{name}-{turn}")] += 1
    return outcomes


async def _send_hostile(engine: AsyncEngine, kind: GrammarKind, text: str, *, salt: str) -> str:
    sampling = SamplingParams(max_tokens=_HOSTILE_TOKENS, grammar=Grammar(kind, text))
    request = Request(request_id=f"hostile-{salt}", prompt_token_ids=_PROMPT, sampling=sampling, cache_salt=salt)
    try:
        async for _ in engine.generate(request):
            pass
    except CarouselError as error:
        return type(error).__name__
    return "answered"


if __name__ == "__main__":
    sys.exit(main())
