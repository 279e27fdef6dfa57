"""Decides what every step computes, and books what came out. No torch here, no threads, no clock.

One rule, taken from vLLM's V1 scheduler: there is no prefill phase and no decode phase. A step hands out a token
budget so that each sequence's computed tokens catch up with its known tokens. Chunked prefill (Sarathi, Agrawal et
al., 2023), prefix hits, preempted and decoding sequences are one code path.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from app.config import SchedulerConfig
from app.engine.batch import Batch, ScheduledSequence, TokenHistory
from app.engine.blocks import BlockPool
from app.engine.policy import SchedulingPolicy
from app.engine.request import FinishReason, Request, SamplingParams, TokenDelta
from app.engine.sequence import Sequence, SequenceStatus
from app.engine.stats import EngineStats
from app.engine.strategy import BatchingStrategy
from app.engine.waiting import WaitingQueue


@dataclass(slots=True)
class _Totals:
    """What has happened since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Step:
    """A batch in the making."""

    num_tokens_left: int
    has_preempted: bool = False
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # one for each of `scheduled`

    def add(self, sequence: Sequence, item: ScheduledSequence) -> None:
        self.scheduled.append(item)
        self.sequences.append(sequence)
        self.num_tokens_left -= len(item.token_ids)


class Scheduler:
    """Owns every sequence from its arrival to its end, and the blocks of those that run.

    `schedule` and `update` are apart so that a model may run between them: every batch that is scheduled must be
    either updated or failed before the next is scheduled. Whoever schedules a step while the one before it still runs
    calls `advance` and `settle` in place of `update`; at most one batch may be between the two.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pool: BlockPool,
        strategy: BatchingStrategy,
        policy: SchedulingPolicy,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._config = config
        self._pool = pool
        self._strategy = strategy
        self._policy = policy
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}  # waiting and running, by request id
        self._waiting = WaitingQueue(policy)
        self._running: list[Sequence] = []  # in policy order: the last is preempted first
        self._num_arrived = 0
        self._totals = _Totals()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is waiting or running."""
        return request_id in self._sequences

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new, and its tokens must fit into the pool when it runs alone."""
        assert request.request_id not in self._sequences, f"request {request.request_id} was added twice"
        sequence = Sequence(
            request=request, arrival=self._num_arrived, end_token_ids=self._end_token_ids(request.sampling)
        )
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request at its caller's wish; None when it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._totals.aborted += 1
        self._finish(sequence)
        return TokenDelta(request_id=request_id, token_ids=(), finish_reason=FinishReason.ABORT)

    def fail(self, batch: Batch) -> list[str]:
        """End every request of a batch whose step raised; returns their ids."""
        failed = [sequence for sequence in batch.sequences if not sequence.is_finished]
        for sequence in failed:
            self._totals.failed += 1
            self._finish(sequence)
        return [sequence.request.request_id for sequence in failed]

    # ------------------------------------------------------------------ schedule

    def schedule(self, *, is_ahead: bool = False) -> Batch:
        """The next step's work: first the running sequences, then as many waiting ones as may join.

        With `is_ahead` the step before has advanced and is not settled: the batch may be empty, and a token that is
        not known yet stands in it as `advance` says.
        """
        step = _Step(num_tokens_left=self._config.max_step_tokens)
        self._schedule_running(step, self._unfinished() if is_ahead else list(self._running))
        if not step.has_preempted:  # memory is short; whoever joined now would be the next victim
            self._admit_waiting(step)
        return Batch(scheduled=tuple(step.scheduled), sequences=tuple(step.sequences))

    def _unfinished(self) -> list[Sequence]:
        """The running sequences without those that have drawn their last token and only wait to hear which."""
        return [s for s in self._running if len(s.generated_token_ids) < s.request.sampling.max_tokens]

    def _schedule_running(self, step: _Step, running: list[Sequence]) -> None:
        block_size = self._pool.block_size
        num_behind = len(running)
        for sequence in running:
            num_behind -= 1
            if step.has_preempted and not sequence.is_running:
                continue  # preempted for one before it
            if sequence.is_decoding:  # the common case, made short: one token more, and seldom another block
                if sequence.num_computed_tokens % block_size == 0 and not self._make_room(sequence, 1, step):
                    continue
                step.add(sequence, _decoding(sequence) if sequence.draws_freely else self._scheduled(sequence, 1))
                continue
            # Each of the sequences behind keeps a token, so a long prompt never stops the others' decoding.
            num_tokens = self._chunk(sequence, step.num_tokens_left - num_behind)
            if self._make_room(sequence, num_tokens, step):
                step.add(sequence, self._scheduled(sequence, num_tokens))

    def _admit_waiting(self, step: _Step) -> None:
        num_admissible = self._strategy.num_admissible(num_running=len(self._running), num_waiting=len(self._waiting))
        for _ in range(num_admissible):
            sequence = self._waiting.peek()
            if step.num_tokens_left <= 0 or not self._try_join(sequence):
                return  # whoever is next in order waits; nobody overtakes
            num_tokens = self._chunk(sequence, step.num_tokens_left)
            sequence.extend_blocks(self._pool.allocate(self._num_missing_blocks(sequence, num_tokens)))
            step.add(sequence, self._scheduled(sequence, num_tokens))

    def _try_join(self, sequence: Sequence) -> bool:
        """Let the first waiting sequence run if all of its known tokens find room, using cached prefixes."""
        if sequence.has_unknown_token:
            return False  # preempted while its last step ran
        cached = self._pool.match(sequence.token_ids(0, sequence.num_tokens), salt=sequence.request.cache_salt)
        num_blocks = self._pool.num_blocks_for(sequence.num_tokens) - len(cached)
        if not self._pool.can_allocate(num_blocks + self._pool.num_free_among(cached)):
            return False
        self._waiting.pop()
        self._pool.share(cached)
        sequence.extend_blocks(cached)
        sequence.prefix_ids = [block.prefix_id for block in cached if block.prefix_id is not None]
        sequence.num_computed_tokens = len(cached) * self._pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._totals.prompt_tokens += sequence.num_prompt_tokens
            self._totals.cached_tokens += sequence.num_cached_tokens
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=self._policy.key)
        return True

    def _chunk(self, sequence: Sequence, num_tokens_left: int) -> int:
        return min(sequence.num_uncomputed_tokens, self._config.prefill_chunk_tokens, num_tokens_left)

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return self._pool.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.blocks)

    def _make_room(self, sequence: Sequence, num_tokens: int, step: _Step) -> bool:
        """Give the sequence the blocks it needs, preempting from the end; False if it had to go itself."""
        num_blocks = self._num_missing_blocks(sequence, num_tokens)
        while not self._pool.can_allocate(num_blocks):
            step.has_preempted = True
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.extend_blocks(self._pool.allocate(num_blocks))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks back; it waits at its old place and recomputes later."""
        self._leave_running(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._totals.preemptions += 1
        self._waiting.push(sequence)

    def _scheduled(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        sampling = sequence.request.sampling
        samples = num_tokens == sequence.num_uncomputed_tokens
        history = None
        if samples and sampling.has_penalties:
            history = TokenHistory(
                prompt=sequence.request.prompt_token_ids, generated=tuple(sequence.generated_token_ids)
            )
        return ScheduledSequence(
            sequence.request.request_id,
            sequence.token_ids(start, start + num_tokens),
            start,
            sequence.block_ids,
            samples,
            sampling,
            banned_token_ids=self._banned_token_ids(sequence) if samples else (),
            history=history,
        )

    def _banned_token_ids(self, sequence: Sequence) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        if sequence.num_generated_tokens >= sampling.min_tokens:
            return ()
        return (*self._eos_token_ids, *sampling.stop_token_ids)

    def _end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Where generation ends. Requests without stop tokens of their own share one set."""
        eos_token_ids = frozenset[int]() if sampling.ignore_eos else self._eos_token_ids
        return eos_token_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos_token_ids

    # ------------------------------------------------------------------ update

    def update(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
        """Book a step's results; `token_ids` holds one drawn token for each of `batch.sampled`, in order."""
        assert len(token_ids) == len(batch.sampled), f"{len(token_ids)} tokens for {len(batch.sampled)} sequences"
        block_size, finished = self._pool.block_size, SequenceStatus.FINISHED
        drawn = iter(token_ids)
        deltas: list[TokenDelta] = []
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            token_id = next(drawn) if item.samples else None
            if sequence.status is finished:
                continue  # aborted while the step ran
            sequence.num_computed_tokens = end = item.end
            if end >= (len(sequence.prefix_ids) + 1) * block_size:
                self._publish_full_blocks(sequence, end)
            if token_id is not None:
                deltas.append(self._append(sequence, token_id))
        self._totals.steps += 1
        self._totals.generated_tokens += len(deltas)
        return deltas

    def advance(self, batch: Batch) -> None:
        """Count a batch as computed before its tokens are known, so that the next can be scheduled meanwhile.

        The token drawn for `batch.sampled[n]` is stood for by -1 - n until `settle` puts the real one in its place.
        """
        unknown = count(-1, -1)
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            sequence.num_computed_tokens = item.end
            if item.samples:
                sequence.generated_token_ids.append(next(unknown))

    def settle(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
        """Book the tokens of a batch that has advanced; as `update` otherwise.

        A sequence that ends here may have been scheduled once more: what that step draws for it is thrown away.
        """
        assert len(token_ids) == len(batch.sampled), f"{len(token_ids)} tokens for {len(batch.sampled)} sequences"
        drawn = iter(token_ids)
        deltas: list[TokenDelta] = []
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            token_id = next(drawn) if item.samples else None
            if sequence.is_finished:
                continue
            if item.block_ids is sequence.block_ids:  # else it was preempted since, and the blocks are others'
                self._publish_full_blocks(sequence, item.end)
            if token_id is not None:
                at = item.end - sequence.num_prompt_tokens
                sequence.generated_token_ids[at] = token_id
                deltas.append(self._drawn(sequence, token_id, num_generated=at + 1))
        self._totals.steps += 1
        self._totals.generated_tokens += len(deltas)
        return deltas

    def _publish_full_blocks(self, sequence: Sequence, num_computed_tokens: int) -> None:
        size = self._pool.block_size
        for index in range(len(sequence.prefix_ids), num_computed_tokens // size):
            parent = sequence.prefix_ids[-1] if sequence.prefix_ids else sequence.request.cache_salt
            content = sequence.token_ids(index * size, (index + 1) * size)
            sequence.prefix_ids.append(self._pool.publish(sequence.blocks[index], content, parent=parent))

    def _append(self, sequence: Sequence, token_id: int) -> TokenDelta:
        generated = sequence.generated_token_ids
        generated.append(token_id)
        return self._drawn(sequence, token_id, len(generated))

    def _drawn(self, sequence: Sequence, token_id: int, num_generated: int) -> TokenDelta:
        """What the caller hears of a new token; ends the sequence if it was the last."""
        request = sequence.request
        if token_id in sequence.end_token_ids:
            reason = FinishReason.STOP
        elif num_generated >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        else:  # by position: names take twice as long, and most tokens end here
            return TokenDelta(request.request_id, (token_id,), None, None, sequence.num_cached_tokens)
        self._totals.finished += 1
        self._finish(sequence)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _finish(self, sequence: Sequence) -> None:
        """Every sequence passes here exactly once."""
        del self._sequences[sequence.request.request_id]
        was_waiting = sequence.status is SequenceStatus.WAITING
        if sequence.is_running:
            self._leave_running(sequence)
        sequence.status = SequenceStatus.FINISHED
        if was_waiting:
            self._waiting.remove_finished()

    def _leave_running(self, sequence: Sequence) -> None:
        # The running ones are in policy order: a search by key, where list.remove would compare half of them.
        index = bisect_left(self._running, self._policy.key(sequence), key=self._policy.key)
        while self._running[index] is not sequence:  # others may have the same key
            index += 1
        del self._running[index]
        self._pool.free(sequence.take_blocks())

    # ------------------------------------------------------------------ prefixes

    def clear_prefix_cache(self) -> None:
        """Forget every shared prefix. Running sequences keep their blocks."""
        self._pool.clear_cache()

    # ------------------------------------------------------------------ facts

    def stats(self) -> EngineStats:
        totals = self._totals
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            total_steps=totals.steps,
            total_prompt_tokens=totals.prompt_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_generated_tokens=totals.generated_tokens,
            total_preemptions=totals.preemptions,
            total_finished=totals.finished,
            total_aborted=totals.aborted,
            total_failed=totals.failed,
        )


def _decoding(sequence: Sequence) -> ScheduledSequence:
    """The share of a sequence that is decoding and draws freely; what `_scheduled` gives, only sooner."""
    request = sequence.request
    return ScheduledSequence(  # by position: names take twice as long
        request.request_id,
        (sequence.generated_token_ids[-1],),
        sequence.num_computed_tokens,
        sequence.block_ids,
        True,
        request.sampling,
    )
