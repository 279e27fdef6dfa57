"""Measures the real model's step times on this machine, and fits a function to them.

The time depends on a step's tokens (linearly between measured sizes), its sequences, and the tokens to which it
attends. The ratios of measured to fitted times are also stored, and simulations use them as noise.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.build import assemble, build_sync_engine
from app.config import EngineConfig, SchedulerConfig
from app.engine.async_engine import AsyncEngine
from app.engine.batch import StepBatch
from app.engine.observer import EndedStep, StepObserver
from app.engine.request import ModelInfo, Request, SamplingParams, TokenDelta
from app.errors import InvalidSetup
from deployments.plan.traces import Trace
from deployments.threads import shorten_gil_switch_interval

_FORMAT = 3
_MIN_STEPS = 100  # the fit has about ten parameters
NOISE_CLASSES = (4, 32, 128)  # bounds in tokens; noise depends on the size, because small steps are affected more
# All settings are measured in each of this many rounds, so that a disturbance does not affect only one setting. If
# steps are so slow that there are too few, up to `_MAX_ROUNDS` rounds are measured.
_ROUNDS, _MAX_ROUNDS = 4, 40


class StepShape(NamedTuple):
    """The sizes that determine a step's time."""

    num_tokens: int
    num_sequences: int
    num_decode_context: int  # tokens to which decoding sequences attend
    num_prefill_pairs: int  # pairs of a prefill token and a token to which it attends

    @classmethod
    def of(cls, batch: StepBatch) -> StepShape:
        context = pairs = 0
        for item in batch.scheduled:
            num_tokens = len(item.token_ids)
            if num_tokens == 1:
                context += item.start + 1
            else:
                pairs += num_tokens * item.start + num_tokens * (num_tokens + 1) // 2
        return cls(batch.num_scheduled_tokens, len(batch.scheduled), context, pairs)


class MeasuredStep(NamedTuple):
    size: StepShape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The fitted time of a step: a sum of parts in seconds."""

    tokens: Sequence[int]  # step sizes for which a time is known, ascending
    token_s: Sequence[float]  # for each of these sizes, without the parts below
    sequence_s: float  # per sequence
    decode_context_s: float  # per token to which decoding sequences attend
    prefill_pair_s: float
    # Ascending quantiles of measured / fitted time, for each size class in NOISE_CLASSES and for larger steps.
    ratios: Sequence[Sequence[float]]
    median_error: float  # relative error of a step's time, for steps that were held out of the fit
    p90_error: float
    total_error: float  # relative error of the sum of these times; negative if the fitted times are too short
    num_steps: int

    @classmethod
    def linear(cls, step_s: float, token_s: float, *, largest: int = 1000) -> StepCost:
        """Return an artificial cost without noise: `step_s` per step plus `token_s` per token."""
        return cls(
            tokens=(1, largest), token_s=(step_s + token_s, step_s + largest * token_s), sequence_s=0.0,
            decode_context_s=0.0, prefill_pair_s=0.0, ratios=((1.0,),) * (len(NOISE_CLASSES) + 1), median_error=0.0,
            p90_error=0.0, total_error=0.0, num_steps=0,
        )  # fmt: skip

    def drawn_seconds(self, size: StepShape, drawn: float) -> float:
        """Return the time of a step with measured noise. The random number `drawn` in [0, 1) selects the noise."""
        ratios = self.ratios[bisect_left(NOISE_CLASSES, size.num_tokens)]
        return self.seconds(size) * ratios[int(drawn * len(ratios))]

    def seconds(self, size: StepShape) -> float:
        """Return the mean time of a step."""
        tokens, token_s = self.tokens, self.token_s
        index = min(max(bisect_right(tokens, size.num_tokens), 1), len(tokens) - 1)
        low, high = tokens[index - 1], tokens[index]
        share = (size.num_tokens - low) / (high - low)  # above 1 beyond the largest size
        return (
            token_s[index - 1] + share * (token_s[index] - token_s[index - 1])
            + self.sequence_s * size.num_sequences
            + self.decode_context_s * size.num_decode_context
            + self.prefill_pair_s * size.num_prefill_pairs
        )  # fmt: skip

    @classmethod
    def fit(cls, steps: Sequence[MeasuredStep]) -> StepCost:
        """Fit non-negative parameters by least squares of the relative errors.

        Every fifth step is held out to measure the errors of the fit. Raises InvalidSetup if there are too few steps.
        """
        if len(steps) < _MIN_STEPS:
            raise InvalidSetup(
                f"only {len(steps):,} steps were measured, but {_MIN_STEPS} are needed; increase --seconds"
            )
        kept = [step for number, step in enumerate(steps) if number % 5]
        held = steps[::5]
        knots = _knots([step.size.num_tokens for step in kept])
        found = _non_negative_fit(_features(kept, knots), np.array([step.seconds for step in kept]))
        times = [float(number) for number in found]
        rough = cls(
            tokens=knots, token_s=times[: len(knots)],
            sequence_s=times[-3], decode_context_s=times[-2], prefill_pair_s=times[-1],
            ratios=(), median_error=0.0, p90_error=0.0, total_error=0.0, num_steps=len(steps),
        )  # fmt: skip
        return rough._with_errors(kept, held)

    def _with_errors(self, kept: Sequence[MeasuredStep], held: Sequence[MeasuredStep]) -> StepCost:
        fitted = np.array([self.seconds(step.size) for step in kept])
        ratios = np.array([step.seconds for step in kept]) / fitted
        # Weighted by time, because a plan depends on the total time of all steps.
        mean = float((ratios * fitted).sum() / fitted.sum())
        classes = np.searchsorted(NOISE_CLASSES, [step.size.num_tokens for step in kept])
        measured = np.array([step.seconds for step in held])
        predicted = np.array([self.seconds(step.size) for step in held]) * mean
        errors = np.abs(predicted / measured - 1)
        return StepCost(
            tokens=self.tokens,
            token_s=[each * mean for each in self.token_s],
            sequence_s=self.sequence_s * mean,
            decode_context_s=self.decode_context_s * mean,
            prefill_pair_s=self.prefill_pair_s * mean,
            ratios=[_quantiles(ratios / mean, fitted, classes == index) for index in range(len(NOISE_CLASSES) + 1)],
            median_error=float(np.median(errors)),
            p90_error=float(np.quantile(errors, 0.9)),
            total_error=float(predicted.sum() / measured.sum() - 1),
            num_steps=self.num_steps,
        )


def _quantiles(ratios: NDArray[np.float64], fitted: NDArray[np.float64], chosen: NDArray[np.bool_]) -> list[float]:
    """Return quantiles of the chosen ratios (of all ratios if too few are chosen), scaled to their weighted mean."""
    num_ratios = 200  # the number of quantiles to store
    if chosen.sum() < num_ratios:
        chosen = np.ones(len(ratios), dtype=bool)
    quantiles = np.quantile(ratios[chosen], (np.arange(num_ratios) + 0.5) / num_ratios)
    mean = (ratios[chosen] * fitted[chosen]).sum() / fitted[chosen].sum()
    return [float(each) for each in quantiles / quantiles.mean() * mean]


def _knots(num_tokens: Sequence[int]) -> list[int]:
    """Return the sizes 1, 2, 4, … up to the largest step. Omits sizes near which few steps were measured."""
    largest = max(max(num_tokens), 2)
    knots = [1]
    while knots[-1] < largest:
        knots.append(min(2 * knots[-1], largest))
    counts = np.histogram(num_tokens, bins=[*knots, largest + 1])[0]
    min_near = 10  # steps required on each side of a size, up to the next size
    inner = [knot for knot, *near in zip(knots[1:-1], counts, counts[1:], strict=False) if min(near) >= min_near]
    return [1, *inner, largest]


def _features(steps: Sequence[MeasuredStep], knots: Sequence[int]) -> NDArray[np.float64]:
    """Return each step's interpolation weight for each knot, then its other sizes, [num_steps, num_knots + 3]."""
    sizes = np.array([step.size for step in steps], dtype=np.float64)
    hats = np.stack([np.interp(sizes[:, 0], knots, row) for row in np.eye(len(knots))], axis=1)
    return np.concatenate([hats, sizes[:, 1:]], axis=1)


def _non_negative_fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit by least squares of relative errors. While any parameter is negative, the lowest is set to 0.

    A second fit excludes steps that took more than three times their fitted time, because they were interrupted.
    """
    found = np.zeros(features.shape[1])
    rows = np.ones(len(seconds), dtype=bool)
    for _ in range(2):
        active = list(np.flatnonzero((features[rows] > 0).any(axis=0)))
        scales = 1 / seconds[rows]
        while True:
            solution = np.linalg.lstsq(features[rows][:, active] * scales[:, None], np.ones(rows.sum()), rcond=None)[0]
            if solution.min() >= 0:
                break
            del active[int(solution.argmin())]
        found = np.zeros(features.shape[1])
        found[active] = solution
        rows = seconds < 3 * np.maximum(features @ found, 1e-9)
    return found


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReplica:
    """A replica's measurements on this machine that a simulation needs. Can be stored as JSON."""

    model: str
    num_threads: int | None
    num_blocks: int
    block_size: int
    model_info: ModelInfo
    cost: StepCost
    kv_bytes: int = 0  # bytes per KV block; 0 if replicas cannot fetch KV memory from each other

    def write(self, path: Path) -> None:
        """Write a JSON file. Raises InvalidSetup if this fails."""
        try:
            path.write_text(json.dumps({"step_cost": _FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidSetup(f"{path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> MeasuredReplica:
        """Read a JSON file. Raises InvalidSetup if the file cannot be read or was not written by `write`."""
        try:
            found = json.loads(path.expanduser().read_text(encoding="utf-8"))
            if found.pop("step_cost") != _FORMAT:
                raise ValueError("another format")
            return cls(
                model_info=ModelInfo.of_json(found.pop("model_info")), cost=StepCost(**found.pop("cost")), **found
            )
        except OSError as error:
            raise InvalidSetup(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidSetup(f"{path} contains no valid step times; measure again without --costs") from error


def measure(
    config: EngineConfig, trace: Trace, settings: Sequence[SchedulerConfig], *, seconds: float
) -> MeasuredReplica:
    """Load the model, serve the trace's requests for `seconds` with alternating settings, and fit the step times.

    The engine runs in its own thread, as in a replica. Half of the time, as many requests are running as the setting
    allows. In the other half, clients pause between requests, so that the engine is sometimes idle.

    Raises InvalidSetup if the model cannot be loaded as configured, a request in the trace is too long, or steps are so
    slow that too few were measured.
    """
    shorten_gil_switch_interval()  # as replicas do
    largest = config.scheduler.model_copy(
        update={name: max(getattr(each, name) for each in settings) for name in ("max_running", "max_step_tokens")}
    )
    loaded = build_sync_engine(config.model_copy(update={"scheduler": largest}))
    num_blocks = loaded.stats().num_blocks
    trace.check_lengths(loaded.model_info.max_model_len)
    times = _MeasuredSteps()
    engine = AsyncEngine(
        assemble(
            largest,
            config.cache,
            num_blocks=num_blocks,
            runner=loaded.runner,
            model_info=loaded.model_info,
            recorder=times,
        ),
        max_requests=2 * largest.max_running,
    )
    try:
        asyncio.run(_serve_all(engine, times, trace, settings, seconds=seconds))
    finally:
        engine.shutdown()
    memory = loaded.runner.kv_memory()
    return MeasuredReplica(
        model=config.model.path,
        num_threads=config.model.num_threads,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        model_info=loaded.model_info,
        cost=StepCost.fit(times.steps),
        kv_bytes=0 if memory is None else memory.block_bytes,
    )


async def _serve_all(
    engine: AsyncEngine, times: _MeasuredSteps, trace: Trace, settings: Sequence[SchedulerConfig], *, seconds: float
) -> None:
    load = _ClosedLoop(engine, trace)
    await load.run(settings[0], seconds=seconds / 20, pauses=False)  # a warm-up for allocators and compilers
    times.steps.clear()
    for number in range(_MAX_ROUNDS):
        if number >= _ROUNDS and len(times.steps) >= _MIN_STEPS:
            break
        for setting in settings:
            await load.run(setting, seconds=seconds / _ROUNDS / len(settings), pauses=number % 2 == 1)


class _MeasuredSteps(StepObserver):
    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []

    def step_ended(self, step: EndedStep) -> None:
        if step.batch:
            self.steps.append(MeasuredStep(StepShape.of(step.batch), step.gap_s))


class _ClosedLoop:
    """Sends a new request whenever one ends. Prompts share no prefixes, so the prefix cache is not used."""

    def __init__(self, engine: AsyncEngine, trace: Trace) -> None:
        self._engine = engine
        self._requests = trace.requests
        self._rng = random.Random(1)
        longest = max(each.num_prompt_tokens for each in trace.requests)
        self._tokens = tuple(self._rng.choices(range(engine.model_info.vocab_size), k=100_000 + longest))
        self._sent_at: dict[str, float] = {}  # by the id of each unfinished request
        self._pauses = False
        self._pausing: list[asyncio.TimerHandle] = []
        self._num_sent = 0

    async def run(self, setting: SchedulerConfig, *, seconds: float, pauses: bool) -> None:
        await self._engine.reconfigure(setting)
        self._pauses = pauses
        for _ in range(setting.max_running):
            self._send()
        await asyncio.sleep(seconds)
        for timer in self._pausing:
            timer.cancel()
        for request_id in self._sent_at:
            self._engine.abort(request_id)
        self._pausing.clear()
        self._sent_at.clear()

    def put_all(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                sent_at = self._sent_at.pop(delta.request_id, None)
                if sent_at is not None:  # None if the request was aborted at the end of a slice
                    took_s = time.perf_counter() - sent_at
                    self._send_after(self._rng.expovariate(1 / took_s) if self._pauses else 0.0)

    def _send_after(self, pause_s: float) -> None:
        if pause_s:
            self._pausing.append(asyncio.get_running_loop().call_later(pause_s, self._send))
        else:
            self._send()

    def _send(self) -> None:
        traced = self._rng.choice(self._requests)
        start = self._rng.randrange(100_000)
        self._num_sent += 1
        request = Request(
            request_id=str(self._num_sent),
            prompt_token_ids=self._tokens[start : start + traced.num_prompt_tokens],
            sampling=SamplingParams(max_tokens=traced.num_output_tokens, temperature=0.0, ignore_eos=True),
        )
        self._sent_at[request.request_id] = time.perf_counter()
        self._engine.submit(request, self)
