"""Decides what every step computes, and who ends when. No torch here, no threads, no clock.

One rule, taken from vLLM's V1 scheduler: there is no prefill phase and no decode phase. A step hands out a token
budget so that each sequence's computed tokens catch up with its known tokens. Chunked prefill (Sarathi, Agrawal et
al., 2023), prefix hits, preempted and decoding sequences are one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from app.config import SchedulerConfig
from app.engine.admission import Admission
from app.engine.arrivals import Arrivals
from app.engine.batch import Batch, HoldUp, StepResult
from app.engine.blocks import BlockPool
from app.engine.deadlines import Deadlines, missed
from app.engine.lengths import LengthPredictor
from app.engine.matcher import Matcher
from app.engine.measurements import EngineMeasurements, Measuring
from app.engine.pace import Pace
from app.engine.policies.named import policy_of
from app.engine.policies.policy import SchedulingPolicy
from app.engine.request import FinishReason, Request, TokenDelta
from app.engine.results import Results
from app.engine.running import Running
from app.engine.sequence import Sequence, SequenceStatus
from app.engine.stats import SPEED_STEP_TOKENS, EngineStats
from app.engine.step import Step
from app.engine.strategies.named import strategy_of
from app.engine.strategies.strategy import BatchingStrategy, Situation, StepPlan
from app.engine.totals import Totals
from app.engine.waiting import WaitingRoom
from app.errors import CarouselError


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
        self._running = Running(pool)
        self._preempted: list[Sequence] = []  # since the last step was scheduled
        self._ended: list[TokenDelta] = []  # of those that ended without a step, until `update` tells their callers
        self._deadlines = Deadlines()
        self._lengths = LengthPredictor()
        self._pace = Pace()
        self._measuring = Measuring()
        self._arrivals = Arrivals(lengths=self._lengths, pace=self._pace, eos_token_ids=self._eos_token_ids)
        self._results = Results(pool, self._end_by_itself)
        self._last_step_at = 0.0  # when the last step's results were booked
        self._totals = Totals()
        self._admission = self._new_admission()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._ended)

    def due_at(self, now: float) -> float | None:
        """When `schedule` will have something to do if nobody arrives: at once if not after `now`; None: never."""
        if len(self._running) or self._ended:
            return now
        times = (self._strategy.opens_at(self._situation(now)), self._deadlines.next_at)
        return min((at for at in times if at is not None), default=None)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is waiting or running."""
        return request_id in self._sequences

    # ------------------------------------------------------------------ coming and going

    def add(self, request: Request, *, now: float, matcher: Matcher | None = None) -> None:
        """Queue a request that arrived at `now`.

        Its id must be new, and its tokens must fit into the pool when it runs alone. `matcher` has seen its generated
        tokens.
        """
        assert request.request_id not in self._sequences, f"request {request.request_id} was added twice"
        sequence = self._arrivals.sequence_of(request, self._policy, now=now, matcher=matcher)
        if sequence.deadline_at is not None:
            self._deadlines.watch(sequence, self._give_up_at(sequence, sequence.deadline_at))
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)

    def _give_up_at(self, sequence: Sequence, deadline_at: float) -> float:
        if not self._sequences:
            return deadline_at  # an idle engine tries: how else would it learn that it has become faster?
        return self._arrivals.give_up_at(sequence, self._policy, chunk_tokens=self._config.prefill_chunk_tokens)

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

    def _end_by_itself(self, sequence: Sequence, num_generated: int) -> None:
        """It has got its last token."""
        self._totals.finished += 1
        self._finish(sequence)
        self._lengths.learn(sequence.request, num_generated=num_generated, num_predicted=sequence.num_predicted_tokens)

    def _finish(self, sequence: Sequence) -> None:
        """Every sequence passes here exactly once."""
        del self._sequences[sequence.request.request_id]
        was_waiting = sequence.status is SequenceStatus.WAITING
        if sequence.is_running:
            self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        if was_waiting:
            self._waiting.note_finished(sequence)
        if sequence.deadline_at is not None:
            self._deadlines.note_finished()

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float, *, is_ahead: bool = False) -> Batch:
        """The next step's work: first the running sequences, then as many waiting ones as may join.

        Empty while the strategy waits for somebody to arrive or for a timer; see `due_at`. With `is_ahead` the step
        before has advanced and is not settled: the batch may be empty then too, and a token that is not known yet
        stands in it as `advance` says.
        """
        self._end_late(now)
        for sequence in self._admission.in_the_way():
            self._preempt(sequence)
        plan = self._strategy.plan(self._situation(now))
        step = Step(
            budget=self._config.max_step_tokens,
            max_prefill_tokens=plan.max_prefill_tokens,
            max_background_tokens=(self._config.background_prefill_tokens if self._serves_foreground(plan) else None),
            chunk_tokens=self._config.prefill_chunk_tokens,
            max_scored_tokens=self._config.max_scored_tokens,
            eos_token_ids=self._eos_token_ids,
        )
        self._schedule_running(step, plan.taking_part(self._running.by_rank, is_ahead=is_ahead))
        # Where one was preempted, memory is short: whoever joined would go next.
        num_running = len(step.sequences)
        hold_up = HoldUp.BLOCKS if step.has_preempted else self._admission.admit(step, plan)
        self._measuring.joined(step.sequences[num_running:], now)
        preempted, self._preempted = self._preempted, []
        return step.batch(
            now=now,
            preempted=preempted,
            hold_up=hold_up if len(self._waiting) else None,
            num_waiting=len(self._waiting),
            num_free_blocks=self._pool.num_free,
        )

    def _serves_foreground(self, plan: StepPlan) -> bool:
        """Whether somebody waits for anything in this step: background requests are last in any order."""
        first = self._running.by_rank[:1]
        if plan.num_admissible:
            first = [*first, self._waiting.peek(plan.bucket)]
        return any(not sequence.request.is_background for sequence in first)

    def _situation(self, now: float) -> Situation:
        return Situation(
            now=now,
            max_running=self._config.max_running,
            max_step_tokens=self._config.max_step_tokens,
            running=self._running.by_rank,
            waiting=self._waiting,
        )

    def _schedule_running(self, step: Step, running: list[Sequence]) -> None:
        block_size = self._pool.block_size
        num_behind = len(running)
        for sequence in running:
            num_behind -= 1
            if step.has_preempted and not sequence.is_running:
                continue  # preempted for one before it
            if sequence.is_decoding:  # the common case, made short: one token more, and seldom another block
                if sequence.num_computed_tokens % block_size or self._make_room(sequence, 1, step):
                    step.add_decoding(sequence)
                continue
            # Each of the sequences behind keeps a token, so a long prompt never stops the others' decoding.
            num_tokens = step.chunk(sequence, num_reserved=num_behind)
            if num_tokens > 0 and self._make_room(sequence, num_tokens, step):
                step.add_prefill(sequence, num_tokens)

    def _make_room(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Give the sequence the blocks it needs, preempting from the end; False if it had to go itself."""
        while not self._running.has_room_for(sequence, num_tokens):
            step.has_preempted = True
            victim = self._running.last
            self._preempt(victim)
            if victim is sequence:
                return False
        self._running.extend(sequence, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks back; it waits at its old place and recomputes later."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._totals.preemptions += 1
        self._preempted.append(sequence)
        self._strategy.preempted(sequence)
        self._waiting.push(sequence)

    # ------------------------------------------------------------------ update

    def update(self, batch: Batch, result: StepResult, *, now: float) -> list[TokenDelta]:
        """Book a step's result.

        An empty batch is none: only those are told of that ended without a step.
        """
        return self._told(batch, result, now, self._results.book)

    def advance(self, batch: Batch) -> None:
        """Count a batch as computed before its tokens are known, so that the next can be scheduled meanwhile.

        The token drawn for `batch.sampled[n]` is stood for by -1 - n until `settle` puts the real one in its place.
        """
        self._results.advance(batch)

    def retreat(self, batch: Batch) -> None:
        """Take back that a batch has advanced, because its step failed: all of it is computed again."""
        self._results.retreat(batch)

    def settle(self, batch: Batch, result: StepResult, *, now: float) -> list[TokenDelta]:
        """Book the result of a batch that has advanced; as `update` otherwise.

        A sequence that ends here may have been scheduled once more: what that step draws for it is thrown away.
        """
        return self._told(batch, result, now, self._results.book_advanced)

    def _told(
        self, batch: Batch, result: StepResult, now: float, book: Callable[[Batch, StepResult], list[TokenDelta]]
    ) -> list[TokenDelta]:
        """What callers hear after a step: who ended otherwise, then what the step gave, as `book` books it."""
        num_drawn, num_sampled = len(result.token_ids), len(batch.sampled)
        assert num_drawn == num_sampled, f"{num_drawn} tokens for {num_sampled} sequences"
        self._end_late(now)  # an answer that comes too late is none
        deltas, self._ended = self._ended, []
        if batch:
            num_ended = len(deltas) - self._totals.finished
            booked = book(batch, result)
            self._totals.generated_tokens += sum([len(delta.token_ids) for delta in booked])
            self._note_step(batch, now, num_ended=num_ended + self._totals.finished)
            deltas += booked
        return deltas

    def _note_step(self, batch: Batch, now: float, *, num_ended: int) -> None:
        self._totals.steps += 1
        began_at = max(batch.began_at, self._last_step_at)  # a step ahead begins while the one before it runs
        self._last_step_at = now
        self._pace.note_step(now - began_at, num_tokens=batch.num_scheduled_tokens, num_ended=num_ended)
        self._measuring.stepped(now, step_s=now - began_at, num_tokens=batch.num_scheduled_tokens)
        self._policy.computed(batch)
        if not len(self._running):
            self._strategy.emptied(now)

    # ------------------------------------------------------------------ between two steps

    def clear_prefix_cache(self) -> None:
        """Forget every shared prefix. Running sequences keep their blocks."""
        self._pool.clear_cache()

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
            self._running.reorder(self._policy.rank)
            for sequence in waiting:
                sequence.rank = self._policy.rank(sequence)
                self._waiting.push(sequence)
        self._admission = self._new_admission()
        while len(self._running) > config.max_running:
            self._preempt(self._running.last)

    def _new_admission(self) -> Admission:
        """By the rules that hold now."""
        return Admission(
            max_running=self._config.max_running,
            policy=self._policy,
            strategy=self._strategy,
            waiting=self._waiting,
            running=self._running,
            pool=self._pool,
            totals=self._totals,
        )

    def stats(self) -> EngineStats:
        totals = self._totals
        return EngineStats(
            strategy=self._config.strategy.name,
            policy=self._config.policy.name,
            batch_size=self._strategy.batch_size,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_waiting_foreground_tokens=self._waiting.num_foreground_tokens,
            num_background=self._running.num_background + len(self._waiting) - self._waiting.num_foreground,
            num_staying_background=0 if self._strategy.joins_any_step else self._running.num_background,
            estimated_wait_s=self._estimated_wait_s(),
            ended_per_s=self._pace.ended_per_s,
            mean_length_error_tokens=self._lengths.mean_error_tokens,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            block_size=self._pool.block_size,
            max_running=self._config.max_running,
            speed=self._pace.tokens_per_s_at(SPEED_STEP_TOKENS),
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

    def measurements(self) -> EngineMeasurements:
        """What has been measured so far. Any thread may ask: what is read here is replaced or counted as a whole."""
        return self._measuring.snapshot(
            max_running=self._config.max_running,
            block_size=self._pool.block_size,
            num_outstanding_tokens=self._waiting.work + sum([each.remaining_work for each in list(self._running)]),
        )

    def _estimated_wait_s(self) -> float:
        """How long a request that arrives now waits before it joins: what is before it, at the pace of late."""
        if not len(self._waiting) and len(self._running) < self._config.max_running:
            return 0.0
        tokens_per_s = self._pace.tokens_per_s
        if not tokens_per_s:
            return 0.0
        return max(self._waiting.work / tokens_per_s, 1.0 / self._pace.ended_per_s if self._pace.ended_per_s else 0.0)
