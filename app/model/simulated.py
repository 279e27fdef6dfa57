"""A model runner that sleeps for the duration of each step, to run fleets on machines without GPUs.

A cost model determines the duration, and many replicas can share a core. Tokens are text tokens of a real tokenizer. As
in a real model, they depend on the whole sequence through a simulated KV memory: a wrong block, position or resumption
changes the tokens and their invented log-probabilities. Grammars are followed; penalties, biases and filters are
ignored. This module does not import torch.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

from pydantic import Field

from app.config import EngineConfig, Settings
from app.engine.batch import ScheduledSequence, StepBatch, StepResult, by_request
from app.engine.model_runner import ModelRunner
from app.engine.request import ModelInfo, TokenLogprobs

_MASK = 2**64 - 1
_START = 0x9E3779B97F4A7C15  # the hash of no tokens
# Multipliers of the finaliser of splitmix64 (Steele, Lea & Flood, 2014).
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class SimulatedCosts(Settings):
    """The fields of `model.simulated`: the duration of steps, and the behaviour of the simulated model."""

    step_ms: float = Field(10.0, ge=0, le=60_000)
    per_token_ms: float = Field(0.0, ge=0, le=60_000)  # added for each token of a step
    end_probability: float = Field(0.0, ge=0, le=1)  # chance that a token is an end token instead of text
    wake_ms: float = Field(0.0, ge=0, le=600_000)  # duration of waking up
    embedding_size: int = Field(0, ge=0, le=65_536)  # size of embeddings; 0 if the model has none
    memory_gib: float = Field(0.0, ge=0)  # device memory that the model occupies while awake
    # Slots for states as in a model with recurrent layers, two for each sequence; 0 if the model has no states.
    num_state_slots: int = Field(0, ge=0, le=65_536, multiple_of=2)
    crash_token_id: int | None = Field(None, ge=0)  # a step with this token kills the process, to test failover


class SimulatedModelRunner(ModelRunner):
    """Samples tokens by hashes. Each slot of the KV memory stores a 64-bit hash of all tokens up to its own."""

    can_sleep = True

    def __init__(
        self,
        costs: SimulatedCosts,
        *,
        text_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """text_token_ids: the tokens to sample from, at least one. clock returns seconds, sleep accepts seconds."""
        self._costs = costs
        self._text = tuple(text_token_ids)
        self._eos = tuple(eos_token_ids)
        self._end_below = int(costs.end_probability * 2**32) if self._eos else 0
        self._block_size = block_size
        self._num_slots = num_blocks * block_size
        self._states = array("Q", bytes(8 * costs.num_state_slots))  # by slot: the hash of all tokens before it
        self._slots = self._blank_slots()
        self._clock = clock
        self._sleep = sleep

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step. Sleeps until the step's simulated duration has passed."""
        ends_at = self._clock() + self.step_s(batch)
        self._crash_if_asked(batch)
        for item in batch.scheduled:
            self._write(item)
        token_ids = [self._draw(item) for item in batch.sampled]
        result = self._with_logprobs(batch, token_ids) if batch.has_logprobs else StepResult(token_ids)
        if batch.has_pooling:
            result = result._replace(pooled=self._pooled(batch))
        left_s = ends_at - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return result

    def sleep(self) -> None:
        self._slots = array("Q")

    def wake(self) -> None:
        """Sleep for `wake_ms`, and clear the KV memory."""
        self._sleep(self._costs.wake_ms / 1000)
        self._slots = self._blank_slots()

    def _blank_slots(self) -> array[int]:
        return array("Q", bytes(8 * self._num_slots))

    def step_s(self, batch: StepBatch) -> float:
        """Return the duration of a step in seconds."""
        return (self._costs.step_ms + self._costs.per_token_ms * batch.num_tokens) / 1000

    def _crash_if_asked(self, batch: StepBatch) -> None:
        crash_token_id = self._costs.crash_token_id
        if crash_token_id is not None and any(crash_token_id in item.token_ids for item in batch.scheduled):
            os.kill(os.getpid(), signal.SIGKILL)  # as a fault in native code or the out-of-memory killer would

    def _write(self, item: ScheduledSequence) -> None:
        """Store the hashes of the new tokens, continuing from the previous token's slot, or from the state to read."""
        slots, size, block_ids, position = self._slots, self._block_size, item.block_ids, item.start
        prefix = _START
        if position:
            prefix = slots[block_ids[(position - 1) // size] * size + (position - 1) % size]
        if position and item.states is not None:
            prefix = self._states[item.states.read]
        written = {} if item.states is None else {item.start + number: slot for number, slot in item.states.writes}
        factor = 0xD1342543DE82EF95
        for token in item.token_ids:
            prefix = ((prefix ^ token) * factor + 1) & _MASK
            prefix ^= prefix >> 29
            slots[block_ids[position // size] * size + position % size] = prefix
            position += 1
            if position in written:
                self._states[written[position]] = prefix

    def _key(self, item: ScheduledSequence, last: int) -> int:
        """Return the hash that determines the token after position `last`."""
        slots, size, block_ids = self._slots, self._block_size, item.block_ids
        key: int = slots[block_ids[last // size] * size + last % size]
        num_before = last // size
        if num_before:
            # A model attends to all blocks. Here, tokens take turns to read one earlier block each, so that every wrong
            # block has an effect within a few tokens.
            key ^= slots[block_ids[last % num_before] * size + size - 1] * 3 & _MASK
        return key

    def _draw(self, item: ScheduledSequence) -> int:
        key = self._key(item, item.end - 1)
        if item.sampling.temperature:
            key ^= (item.sampling.seed + 1) * _START & _MASK
        key = _mix(key)
        if item.matcher is not None:
            return _among(item.allowed(), key)
        if key >> 32 < self._end_below and self._eos[0] not in item.banned_token_ids:
            return self._eos[0]
        token = self._text[key % len(self._text)]
        if token in item.banned_token_ids:
            return self._another(key, item.banned_token_ids)
        return token

    def _pooled(self, batch: StepBatch) -> dict[str, list[float]]:
        """Return vectors that depend on all tokens of the sequence, by request id."""
        size = self._costs.embedding_size
        keys = {
            item.request_id: self._key(item, item.end - 1).to_bytes(8, "little")
            for item in batch.scheduled
            if item.pooling is not None
        }
        return {
            request_id: [byte - 127.5 for byte in (key * (-(-size // len(key))))[:size]]
            for request_id, key in keys.items()
        }

    def _with_logprobs(self, batch: StepBatch, token_ids: list[int]) -> StepResult:
        logprobs = by_request(
            (item.request_id, self._logprobs(item, item.end - 1, token_id, num_top, item.sampling.logprob_token_ids))
            for item, token_id in zip(batch.sampled, token_ids, strict=True)
            if (num_top := item.sampling.logprobs) is not None
        )
        prompt_logprobs = {
            item.request_id: tuple(
                self._logprobs(item, position - 1, token_id, item.sampling.prompt_logprobs or 0)
                for position, token_id in enumerate(item.targets, start=item.first_target)
            )
            for item in batch.scheduled
            if item.targets
        }
        return StepResult(token_ids, logprobs, prompt_logprobs)

    def _logprobs(
        self, item: ScheduledSequence, last: int, token_id: int, num_top: int, named: tuple[int, ...] = ()
    ) -> TokenLogprobs:
        """Return invented log-probabilities, which fall along the text tokens from the one that would be sampled."""
        first, num_tokens = _mix(self._key(item, last)) % len(self._text), len(self._text)

        def rank(token_id: int) -> int:
            place = self._places.get(token_id)
            return 1 + (num_tokens if place is None else (place - first) % num_tokens)

        top = named or tuple(self._text[(first + n) % num_tokens] for n in range(min(num_top, num_tokens)))
        return TokenLogprobs(-rank(token_id) / 2, rank(token_id), top, tuple(-rank(each) / 2 for each in top))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {token_id: place for place, token_id in enumerate(self._text)}

    def _another(self, key: int, banned: Sequence[int]) -> int:
        allowed = [token for token in self._text if token not in banned] or self._text
        return allowed[key % len(allowed)]


def _among(allowed: bytes, key: int) -> int:
    numbers = [8 * index + bit for index, byte in enumerate(allowed) if byte for bit in range(8) if byte >> bit & 1]
    return numbers[key % len(numbers)]


def num_simulated_blocks(config: EngineConfig, model_info: ModelInfo) -> int:
    """Return the number of blocks: as configured, or enough for all running requests at full length, up to a limit.

    Settings of memory in bytes are ignored, because a simulated token takes no memory.
    """
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    max_default_tokens = 2**20  # bounds the pool's Python objects, one for each block
    num_tokens = min(config.scheduler.max_running * model_info.max_model_len, max_default_tokens)
    return -(-max(num_tokens, model_info.max_model_len) // config.cache.block_size)


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * _MIX_1 & _MASK
    x = (x ^ x >> 27) * _MIX_2 & _MASK
    return x ^ x >> 31
