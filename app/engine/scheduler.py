"""Decides what every step computes, and books what came out. No torch here, no threads, no clock.

One rule, taken from vLLM's V1 scheduler: there is no prefill phase and no decode phase. A step hands out a token
budget so that each sequence's computed tokens catch up with its known tokens. Chunked prefill (Sarathi, Agrawal et
al., 2023), prefix hits, preempted and decoding sequences are one code path.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from app.config import SchedulerConfig
from app.engine.batch import Batch, HoldUp, ScheduledSequence, TokenHistory
from app.engine.blocks import Block, BlockPool
from app.engine.deadlines import Deadlines, missed
from app.engine.lengths import LengthPredictor
from app.engine.pace import Pace
from app.engine.policies.named import policy_of
from app.engine.policies.policy import SchedulingPolicy
from app.engine.request import FinishReason, Request, SamplingParams, TokenDelta
from app.engine.sequence import Sequence, SequenceStatus
from app.engine.stats import EngineStats
from app.engine.strategies.named import strategy_of
from app.engine.strategies.strategy import BatchingStrategy, Situation, StepPlan
from app.engine.waiting import WaitingRoom
from app.errors import CarouselError

_rank = attrgetter("rank")


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
    missed: int = 0


@dataclass(slots=True)
class _Step:
    """A batch in the making."""

    num_tokens_left: int
    num_prefill_tokens_left: int
    has_preempted: bool = False
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # one for each of `scheduled`

    def add(self, sequence: Sequence, item: ScheduledSequence) -> None:
        self.scheduled.append(item)
        self.sequences.append(sequence)
        self.num_tokens_left -= len(item.token_ids)

    def add_prefill(self, sequence: Sequence, item: ScheduledSequence) -> None:
        self.add(sequence, item)
        self.num_prefill_tokens_left -= len(item.token_ids)


class Scheduler:
    """Owns every sequence from its arrival to its end, and the blocks of those that run.

    `schedule` and `update` are apart so that a model may run between them: every batch that is scheduled must be
    either updated or failed before the next is scheduled. Whoever schedules a step while the one before it still runs
    calls `advance` and `settle` in place of `update`; at most one batch may be between the two. Each is told the time,
    in seconds of one monotonic clock.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pool: BlockPool,
        eos_token_ids: Iterable[int],
        strategy: BatchingStrategy | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        """`strategy` and `policy` are those that the config names, unless others are given."""
        self._config = config
        self._pool = pool
        self._strategy = strategy or strategy_of(config.strategy)
        self._policy = policy or policy_of(config.policy)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}  # waiting and running, by request id
        self._waiting = WaitingRoom(self._policy, self._strategy.bucket_of)
        self._running: list[Sequence] = []  # by rank: the last is preempted first
        self._joined: list[Sequence] = []  # since the last step was scheduled, as are those preempted
        self._preempted: list[Sequence] = []
        self._ended: list[TokenDelta] = []  # of those that ended without a step, until `update` tells their callers
        self._deadlines = Deadlines()
        self._lengths = LengthPredictor()
        self._pace = Pace()
        self._last_step_at = 0.0  # when the last step's results were booked
        self._num_arrived = 0
        self._totals = _Totals()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._ended)

    def due_at(self, now: float) -> float | None:
        """When `schedule` will have something to do if nobody arrives: at once if not after `now`; None: never."""
        if self._running or self._ended:
            return now
        times = (self._strategy.opens_at(self._situation(now)), self._deadlines.next_at)
        return min((at for at in times if at is not None), default=None)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is waiting or running."""
        return request_id in self._sequences

    def add(self, request: Request, *, now: float) -> None:
        """Queue a request that arrived at `now`.

        Its id must be new, and its tokens must fit into the pool when it runs alone.
        """
        assert request.request_id not in self._sequences, f"request {request.request_id} was added twice"
        sampling = request.sampling
        num_predicted_tokens = self._lengths.predict(request, quantile=self._policy.length_quantile)
        sequence = Sequence(
            request=request,
            arrival=self._num_arrived,
            arrived_at=now,
            end_token_ids=self._end_token_ids(sampling),
            num_predicted_tokens=sampling.max_tokens if num_predicted_tokens is None else num_predicted_tokens,
        )
        sequence.rank = self._policy.rank(sequence)
        if sequence.deadline_at is not None:
            # Nobody is refused on a guess: without experience, only what is certain to be computed counts.
            num_tokens = max(1, sampling.min_tokens) if num_predicted_tokens is None else num_predicted_tokens
            self._deadlines.watch(sequence, self._give_up_at(sequence, sequence.deadline_at, num_tokens))
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def _give_up_at(self, sequence: Sequence, deadline_at: float, num_output_tokens: int) -> float:
        """When a sequence that has not started is refused for its deadline, with so many tokens to generate."""
        if not self._sequences:
            return deadline_at  # an idle engine tries: how else would it learn that it has become faster?
        num_chunks = -(-sequence.num_prompt_tokens // self._config.prefill_chunk_tokens)
        service_s = self._pace.step_s * (num_chunks + num_output_tokens - 1)
        if sequence.arrived_at + service_s > deadline_at:
            return sequence.arrived_at  # not even if it started now
        give_up_at = self._policy.give_up_at(sequence, service_s)
        return deadline_at if give_up_at is None else give_up_at

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

    def fail_one(self, sequence: Sequence, error: CarouselError) -> None:
        """End one request of a batch whose other requests go on; the next `update` tells its caller."""
        if not sequence.is_finished:
            self._totals.failed += 1
            self._end_with(sequence, error)

    def _end_late(self, now: float) -> None:
        for sequence in self._deadlines.out_of_time(now):
            self._totals.missed += 1
            self._end_with(sequence, missed(sequence, now))

    def _end_with(self, sequence: Sequence, error: CarouselError) -> None:
        delta = TokenDelta(sequence.request.request_id, (), FinishReason.ERROR, error=error)
        self._finish(sequence)
        self._ended.append(delta)

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float, *, is_ahead: bool = False) -> Batch:
        """The next step's work: first the running sequences, then as many waiting ones as may join.

        Empty while the strategy waits for somebody to arrive or for a timer; see `due_at`. With `is_ahead` the step
        before has advanced and is not settled: the batch may be empty then too, and a token that is not known yet
        stands in it as `advance` says.
        """
        self._end_late(now)
        if self._policy.preempts and self._strategy.joins_any_step and len(self._waiting):
            self._make_way(self._waiting.peek())
        plan = self._strategy.plan(self._situation(now))
        budget = self._config.max_step_tokens
        step = _Step(budget, budget if plan.max_prefill_tokens is None else plan.max_prefill_tokens)
        self._schedule_running(step, self._taking_part(plan, is_ahead=is_ahead))
        # Where one was preempted, memory is short: whoever joined would go next.
        hold_up = HoldUp.BLOCKS if step.has_preempted else self._admit_waiting(step, plan)
        joined, self._joined = self._joined, []
        preempted, self._preempted = self._preempted, []
        return Batch(
            tuple(step.scheduled),
            tuple(step.sequences),
            began_at=now,
            num_scheduled_tokens=budget - step.num_tokens_left,
            joined=tuple(joined),
            preempted=tuple(preempted),
            hold_up=hold_up if len(self._waiting) else None,
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
        )

    def _situation(self, now: float) -> Situation:
        return Situation(
            now=now,
            max_running=self._config.max_running,
            max_step_tokens=self._config.max_step_tokens,
            running=self._running,
            waiting=self._waiting,
        )

    def _make_way(self, waiting: Sequence) -> None:
        """Preempt those in whose place the first waiting sequence may run, if that gets it a slot and its blocks."""
        if not self._running or self._running[-1].rank <= waiting.rank:
            return
        _, num_blocks = self._blocks_to_join(waiting)
        num_slots = self._config.max_running - len(self._running)
        num_free = self._pool.num_free
        victims: list[Sequence] = []
        for running in reversed(self._running):
            if (num_slots > 0 and num_free >= num_blocks) or running.rank <= waiting.rank:
                break
            if self._policy.may_preempt(waiting, running):
                victims.append(running)
                num_slots += 1
                num_free += sum(block.num_owners == 1 for block in running.blocks)
        if num_slots > 0 and num_free >= num_blocks:  # else they would go in vain
            for victim in victims:
                self._preempt(victim)

    def _taking_part(self, plan: StepPlan, *, is_ahead: bool) -> list[Sequence]:
        """The running sequences that the strategy wants in the step, less those that only wait for their last token."""
        running = list(self._running) if plan.includes is None else list(filter(plan.includes, self._running))
        if is_ahead:
            running = [s for s in running if len(s.generated_token_ids) < s.request.sampling.max_tokens]
        return running

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
            num_tokens = self._chunk(sequence, step.num_tokens_left - num_behind, step)
            if num_tokens > 0 and self._make_room(sequence, num_tokens, step):
                step.add_prefill(sequence, self._scheduled(sequence, num_tokens))

    def _admit_waiting(self, step: _Step, plan: StepPlan) -> HoldUp:
        """Let in as many as may join, and say why the next in order does not: nobody overtakes it."""
        for _ in range(plan.num_admissible):
            if step.num_tokens_left <= 0 or step.num_prefill_tokens_left <= 0:
                return HoldUp.BUDGET
            sequence = self._waiting.peek(plan.bucket)
            if not self._strategy.admits(sequence):
                return HoldUp.STRATEGY
            if not self._try_join(sequence, plan.bucket):
                return HoldUp.RESULT if sequence.has_unknown_token else HoldUp.BLOCKS
            num_tokens = self._chunk(sequence, step.num_tokens_left, step)
            sequence.extend_blocks(self._pool.allocate(self._num_missing_blocks(sequence, num_tokens)))
            step.add_prefill(sequence, self._scheduled(sequence, num_tokens))
        return HoldUp.SLOTS if len(self._running) >= self._config.max_running else HoldUp.STRATEGY

    def _blocks_to_join(self, sequence: Sequence) -> tuple[list[Block], int]:
        """The cached blocks of its prefix, and how many free ones it takes to hold all of its known tokens."""
        cached = self._pool.match(sequence.token_ids(0, sequence.num_tokens), salt=sequence.request.cache_salt)
        num_blocks = self._pool.num_blocks_for(sequence.num_tokens) - len(cached)
        return cached, num_blocks + self._pool.num_free_among(cached)

    def _try_join(self, sequence: Sequence, bucket: int) -> bool:
        """Let the first waiting sequence run if all of its known tokens find room, using cached prefixes."""
        if sequence.has_unknown_token:
            return False  # preempted while its last step ran
        cached, num_blocks = self._blocks_to_join(sequence)
        if not self._pool.can_allocate(num_blocks):
            return False
        sequence.status = SequenceStatus.RUNNING
        self._waiting.pop(bucket)
        self._pool.share(cached)
        sequence.extend_blocks(cached)
        sequence.prefix_ids = [block.prefix_id for block in cached if block.prefix_id is not None]
        sequence.num_computed_tokens = len(cached) * self._pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._totals.prompt_tokens += sequence.num_prompt_tokens
            self._totals.cached_tokens += sequence.num_cached_tokens
        sequence.rank = self._policy.rank(sequence)
        insort(self._running, sequence, key=_rank)
        self._joined.append(sequence)
        self._policy.joined(sequence)
        self._strategy.joined(sequence)
        return True

    def _chunk(self, sequence: Sequence, num_tokens_left: int, step: _Step) -> int:
        return min(
            sequence.num_uncomputed_tokens,
            self._config.prefill_chunk_tokens,
            num_tokens_left,
            step.num_prefill_tokens_left,
        )

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
        self._preempted.append(sequence)
        self._strategy.preempted(sequence)
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

    def update(self, batch: Batch, token_ids: list[int], *, now: float) -> list[TokenDelta]:
        """Book a step's results; `token_ids` holds one drawn token for each of `batch.sampled`, in order.

        An empty batch is none: only those are told of that ended without a step.
        """
        assert len(token_ids) == len(batch.sampled), f"{len(token_ids)} tokens for {len(batch.sampled)} sequences"
        return self._told(batch, token_ids, now, self._book)

    def _told(
        self, batch: Batch, token_ids: list[int], now: float, book: Callable[[Batch, list[int]], list[TokenDelta]]
    ) -> list[TokenDelta]:
        """What callers hear after a step: who ended otherwise, then what the step drew, as `book` books it."""
        self._end_late(now)  # an answer that comes too late is none
        deltas, self._ended = self._ended, []
        if batch:
            num_ended = len(deltas) - self._totals.finished
            deltas += book(batch, token_ids)
            self._note_step(batch, now, num_ended=num_ended + self._totals.finished)
        return deltas

    def _note_step(self, batch: Batch, now: float, *, num_ended: int) -> None:
        self._totals.steps += 1
        began_at = max(batch.began_at, self._last_step_at)  # a step ahead begins while the one before it runs
        self._last_step_at = now
        self._pace.note_step(now - began_at, num_tokens=batch.num_scheduled_tokens, num_ended=num_ended)
        self._policy.computed(batch)
        if not self._running:
            self._strategy.emptied(now)

    def _book(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
        block_size, finished = self._pool.block_size, SequenceStatus.FINISHED
        drawn = iter(token_ids)
        deltas: list[TokenDelta] = []
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            token_id = next(drawn) if item.samples else None
            if sequence.status is finished:
                continue  # aborted, expired or found guilty while the step ran
            sequence.num_computed_tokens = end = item.end
            if end >= (len(sequence.prefix_ids) + 1) * block_size:
                self._publish_full_blocks(sequence, end)
            if token_id is not None:
                deltas.append(self._append(sequence, token_id))
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

    def retreat(self, batch: Batch) -> None:
        """Take back that a batch has advanced, because its step failed: all of it is computed again."""
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            if item.samples:
                sequence.generated_token_ids.pop()
            if item.block_ids is sequence.block_ids:  # else it was preempted since, and nothing counts as computed
                sequence.num_computed_tokens = item.start

    def settle(self, batch: Batch, token_ids: list[int], *, now: float) -> list[TokenDelta]:
        """Book the tokens of a batch that has advanced; as `update` otherwise.

        A sequence that ends here may have been scheduled once more: what that step draws for it is thrown away.
        """
        assert len(token_ids) == len(batch.sampled), f"{len(token_ids)} tokens for {len(batch.sampled)} sequences"
        return self._told(batch, token_ids, now, self._book_advanced)

    def _book_advanced(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
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
        self._lengths.learn(request, num_generated=num_generated, num_predicted=sequence.num_predicted_tokens)
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
            self._waiting.note_finished(sequence)
        if sequence.deadline_at is not None:
            self._deadlines.note_finished()

    def _leave_running(self, sequence: Sequence) -> None:
        # The running ones are sorted: a search by rank, where list.remove would compare half of them.
        index = bisect_left(self._running, sequence.rank, key=_rank)
        while self._running[index] is not sequence:  # others may have the same rank
            index += 1
        del self._running[index]
        self._pool.free(sequence.take_blocks())

    # ------------------------------------------------------------------ prefixes

    def clear_prefix_cache(self) -> None:
        """Forget every shared prefix. Running sequences keep their blocks."""
        self._pool.clear_cache()

    # ------------------------------------------------------------------ retuning

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Go on under other settings, from the next step on; no request is lost.

        A strategy or policy whose own settings are the same keeps what it has learnt. Those that run go on; when
        fewer may run now, the last in order are preempted.
        """
        is_new_policy, is_new_strategy = config.policy != self._config.policy, config.strategy != self._config.strategy
        self._config = config
        if is_new_policy or is_new_strategy:
            waiting = self._waiting.take_all()
            self._policy = policy_of(config.policy) if is_new_policy else self._policy
            self._strategy = strategy_of(config.strategy) if is_new_strategy else self._strategy
            self._waiting = WaitingRoom(self._policy, self._strategy.bucket_of)
            for sequence in (*self._running, *waiting):
                sequence.rank = self._policy.rank(sequence)
            self._running.sort(key=_rank)
            for sequence in waiting:
                self._waiting.push(sequence)
        while len(self._running) > config.max_running:
            self._preempt(self._running[-1])

    # ------------------------------------------------------------------ facts

    def stats(self) -> EngineStats:
        totals = self._totals
        return EngineStats(
            strategy=self._config.strategy.name,
            policy=self._config.policy.name,
            batch_size=self._strategy.batch_size,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            estimated_wait_s=self._estimated_wait_s(),
            ended_per_s=self._pace.ended_per_s,
            mean_length_error_tokens=self._lengths.mean_error_tokens,
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
            total_missed=totals.missed,
        )

    def _estimated_wait_s(self) -> float:
        """How long a request that arrives now waits before it joins: what is before it, at the pace of late."""
        if not len(self._waiting) and len(self._running) < self._config.max_running:
            return 0.0
        tokens_per_s = self._pace.tokens_per_s
        if not tokens_per_s:
            return 0.0
        return max(self._waiting.work / tokens_per_s, 1.0 / self._pace.ended_per_s if self._pace.ended_per_s else 0.0)


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
