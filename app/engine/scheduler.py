"""Decides which tokens each step computes and when each sequence ends. Does not use torch or threads, or read a clock.

As in vLLM's V1 scheduler, there is no prefill phase and no decode phase. Each step divides a token budget among the
sequences, so that their computed tokens catch up with their known tokens. Chunked prefill (Sarathi, Agrawal et al.,
2023), prefix hits, preempted sequences and decoding sequences share one code path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.config import SchedulerConfig
from app.engine.adapter_store import HeldAdapter
from app.engine.batch import (
    BatchBuilder,
    SchedulingDecision,
    StepBatch,
    StepLimits,
    StepResult,
    WaitReason,
    with_history,
)
from app.engine.block_pool import BlockPool
from app.engine.block_store import BlockStore
from app.engine.deadlines import Deadlines, deadline_missed
from app.engine.fetches import PrefixFetches
from app.engine.matcher import Matcher
from app.engine.policies import make_policy
from app.engine.prefix import Block
from app.engine.request import FinishReason, Request, SamplingParams, TokenDelta
from app.engine.result_processor import ResultProcessor
from app.engine.running import RunningSequences
from app.engine.sequence import EngineSequence, SequenceStatus
from app.engine.speculation.drafter import Drafter, add_drafts, hopes_for_drafts
from app.engine.stats import SPEED_STEP_TOKENS, EngineStats, Totals
from app.engine.step_times import Throughput
from app.engine.strategies import SchedulerView, StepPlan, make_strategy
from app.engine.waiting_queue import WaitingQueue
from app.errors import CarouselError
from app.output_lengths import OutputLengths

# Maximum number of background prompt tokens in a step that also serves foreground requests. On a GPU, decoding is
# limited by memory bandwidth, so 64 more tokens are almost free. On a CPU, they are an eighth of the default step.
BACKGROUND_PREFILL_TOKENS = 64


class Scheduler:
    """Owns every sequence from its arrival to its end, and the blocks of running sequences.

    The model runs between `schedule` and `update`. Every scheduled batch must be passed to `update` or `fail` before
    the next one is scheduled, unless it was committed (`InFlight.commit`). At most one committed batch may be waiting
    for its `update`. All times are in seconds of one monotonic clock.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pool: BlockPool,
        eos_token_ids: Iterable[int],
        computes_whole_prompts: bool = False,
        drafter: Drafter | None = None,
        store: BlockStore | None = None,
        launches_ahead: bool = False,
    ) -> None:
        """computes_whole_prompts: whether each prompt is computed in one step.

        Without a drafter, no step contains drafts. Without a store, blocks exist only in the pool.
        """
        self.config = config  # contains the configured limits
        self.limits = StepLimits.of(config)  # the current limits; lowering them preempts no running sequence
        self._settings = config.version
        self.pool = pool
        self._strategy = make_strategy(config.strategy)
        self._policy = make_policy(config.policy)
        self.drafter = drafter
        self._launches_ahead = launches_ahead  # whether the caller launches a step before the previous step's result
        self._eos_token_ids = frozenset(eos_token_ids)
        self._computes_whole_prompts = computes_whole_prompts
        self._num_arrived = 0
        self._sequences: dict[str, EngineSequence] = {}  # waiting and running, by request id
        self._waiting = WaitingQueue(self._policy.new_queue, self._strategy.bucket_of)
        self._running = RunningSequences(pool)
        self.fetches = PrefixFetches(pool, store)
        self._preempted: list[EngineSequence] = []  # sequences preempted since the last step was scheduled
        self._ended: list[TokenDelta] = []  # deltas of sequences that ended without a step, for the next `update`
        # By median, because a higher estimate would reject requests that could meet their deadlines.
        self._lengths = OutputLengths(by_median=True)
        self._mean_length_error = 0.0  # tokens, absolute; a moving average
        self.throughput = Throughput()
        self._deadlines = Deadlines(self.throughput)
        self._results = ResultProcessor(pool, self._finish_complete)
        self._totals = Totals()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._ended)

    def due_at(self, now: float) -> float | None:
        """Return when `schedule` next has work if no request arrives, or None for never. `now` means immediately."""
        if len(self._running) or self._ended:
            return now
        times = (
            self._strategy.opens_at(self._view(now, self._num_slots)),
            self._deadlines.next_at,
            self.fetches.due_at(now),
        )
        return min((at for at in times if at is not None), default=None)

    def expires_at(self, now: float) -> float | None:
        """Return when a request next ends without a step: `now` if one has ended, None if none has a deadline."""
        return now if self._ended else self._deadlines.next_at

    def has_request(self, request_id: str) -> bool:
        return request_id in self._sequences

    # ------------------------------------------------------------------ arrivals and ends

    def add(
        self, request: Request, *, now: float, matcher: Matcher | None = None, adapter: HeldAdapter | None = None
    ) -> None:
        """Queue a request that arrived at `now`.

        The request's id must not be in use, and its tokens must fit into the pool when it runs alone. `matcher` must
        have advanced past the request's generated tokens. `adapter` is released when the request ends.
        """
        assert request.request_id not in self._sequences, f"request {request.request_id} was added twice"
        num_expected_tokens = self._expected_tokens(request)
        sequence = EngineSequence(
            request=request,
            arrival=self._num_arrived,
            arrived_at=now,
            end_token_ids=self._end_token_ids(request.sampling),
            num_predicted_tokens=request.sampling.max_tokens if num_expected_tokens is None else num_expected_tokens,
            matcher=matcher,
            adapter=adapter,
        )
        self._num_arrived += 1
        if sequence.deadline_at is not None:
            self._deadlines.watch(
                sequence,
                self._policy,
                chunk_tokens=self.limits.prefill_chunk_tokens,
                num_expected_tokens=num_expected_tokens,
                is_idle=not self._sequences,
            )
        self._sequences[request.request_id] = sequence
        self._wait(sequence)

    def _wait(self, sequence: EngineSequence) -> None:
        """Queue a sequence. A sequence that has waited before returns to its old position."""
        self._waiting.push(sequence)
        sequence.order_key = self._policy.order_key(sequence)

    def _expected_tokens(self, request: Request) -> int | None:
        sampling = request.sampling
        if not (sampling.ends_at_eos or sampling.stop_token_ids):
            return sampling.max_tokens  # no stop token can end the output earlier
        return self._lengths.expected(request.length_classes, at_least=sampling.min_tokens, at_most=sampling.max_tokens)

    def _end_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the tokens that end generation. Requests without their own stop tokens share one set."""
        eos_token_ids = self._eos_token_ids if sampling.ends_at_eos else frozenset[int]()
        return eos_token_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos_token_ids

    def abort(self, request_id: str) -> TokenDelta | None:
        """Abort a request. Returns its last delta, or None if it has already ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._totals.aborted += 1
        self._finish(sequence)
        return TokenDelta(request_id=request_id, token_ids=(), finish_reason=FinishReason.ABORT)

    def fail(self, batch: StepBatch) -> list[str]:
        """End every request of a batch whose step failed, and return their ids."""
        failed = [sequence for sequence in batch.sequences if not sequence.is_finished]
        for sequence in failed:
            self._totals.failed += 1
            self._finish(sequence)
        return [sequence.request.request_id for sequence in failed]

    def fail_one(self, sequence: EngineSequence, error: CarouselError) -> None:
        """End only this request of a batch. The next `update` returns its last delta."""
        if not sequence.is_finished:
            self._totals.failed += 1
            self._finish_with(sequence, error)

    def _finish_overdue(self, now: float) -> None:
        for sequence in self._deadlines.overdue(now):
            self._totals.missed += 1
            self._finish_with(sequence, deadline_missed(sequence, now))

    def _finish_with(self, sequence: EngineSequence, error: CarouselError) -> None:
        delta = TokenDelta(sequence.request.request_id, (), FinishReason.ERROR, error=error)
        self._finish(sequence)
        self._ended.append(delta)

    def _finish_complete(self, sequence: EngineSequence, num_generated: int) -> None:
        """End a sequence that is complete, and learn from its output length."""
        self._totals.finished += 1
        self._finish(sequence)
        self._lengths.learn(sequence.request.length_classes, num_generated)
        error = abs(sequence.num_predicted_tokens - num_generated)
        self._mean_length_error += 0.02 * (error - self._mean_length_error)  # averages about 50 requests

    def _finish(self, sequence: EngineSequence) -> None:
        """End a sequence. Called exactly once for every sequence."""
        del self._sequences[sequence.request.request_id]
        was_waiting = sequence.status is SequenceStatus.WAITING
        if sequence.is_running:
            self._running.remove(sequence)
        if sequence.status is SequenceStatus.FETCHING:
            self.fetches.drop(sequence)
        sequence.status = SequenceStatus.FINISHED
        if was_waiting:
            self._waiting.note_finished(sequence)
        if sequence.deadline_at is not None:
            self._deadlines.note_finished(sequence)
        if sequence.adapter is not None:
            sequence.adapter.release()

    # ------------------------------------------------------------------ schedule

    def schedule(self, now: float, *, is_ahead: bool = False) -> StepBatch:
        """Return the batch for the next step: first the running sequences, then the waiting sequences that may join.

        The batch is empty while the strategy waits for arrivals or a timer (see `due_at`). If `is_ahead`, the previous
        step is still in flight. Unknown tokens are then placeholders (see `InFlight.commit`), and the batch may be
        empty even though sequences are running.
        """
        if not len(self._running):
            self.throughput.is_paused = True
        self._finish_overdue(now)
        for sequence in self.fetches.collect(now):
            self._wait(sequence)
        if self._policy.has_new_order(self._running.in_order):
            self._running.reorder(self._policy.order_key)
        num_slots = self._num_slots
        for sequence in self._to_preempt_for_waiting(num_slots):
            self._preempt(sequence)
        plan = self._strategy.plan(self._view(now, num_slots))
        builder = self._new_builder(plan)
        self._schedule_running(builder, self._participants(is_ahead=is_ahead))
        num_running = len(builder.sequences)
        # After a preemption for blocks, memory is short, and a sequence that joined now would be preempted next.
        wait_reason = WaitReason.BLOCKS if builder.has_preempted else self._admit(builder, plan, now)
        joined = builder.sequences[num_running:]
        if self.drafter is not None and not is_ahead:
            is_short = wait_reason is WaitReason.BLOCKS
            add_drafts(builder, self.drafter, self._running, is_short=is_short, max_rows=self._max_rows)
        if self.pool.states is not None:
            builder.give_states(self._running.state_path)
        decision = self._decision(joined, wait_reason)
        launched_alone = self._launches_ahead and not is_ahead
        return builder.build(decision, began_at=now, epoch=self._running.epoch, launched_alone=launched_alone)

    @property
    def _max_rows(self) -> int | None:
        """Maximum tokens in a step with drafts, because each needs a row of logits on the device; None for no limit."""
        return self.config.max_running if self._launches_ahead else None

    def hopes_for_drafts(self) -> bool:
        """Whether the next step will probably have drafts if it waits for the tokens of the step in flight."""
        return self.drafter is not None and hopes_for_drafts(self.drafter, self._running, max_rows=self._max_rows)

    @property
    def _num_slots(self) -> int:
        """Number of slots for sequences in the next step. A sequence that waits for a fetch reserves a slot.

        If the limit was lowered below the number of running sequences, all of them keep their slots. One sequence may
        still displace another.
        """
        return max(self.limits.max_running - len(self.fetches), len(self._running))

    def _view(self, now: float, num_slots: int) -> SchedulerView:
        return SchedulerView(
            now=now,
            max_running=num_slots,
            max_step_tokens=self.limits.max_step_tokens,
            running=self._running.in_order,
            waiting=self._waiting,
        )

    def _new_builder(self, plan: StepPlan) -> BatchBuilder:
        limits = self.limits
        chunk_tokens = limits.prefill_chunk_tokens
        if self.pool.max_chunk_tokens is not None:
            chunk_tokens = min(chunk_tokens, self.pool.max_chunk_tokens)
        return BatchBuilder(
            budget=limits.max_step_tokens,
            max_prefill_tokens=plan.max_prefill_tokens,
            max_background_tokens=BACKGROUND_PREFILL_TOKENS if self._has_foreground(plan) else None,
            chunk_tokens=chunk_tokens,
            eos_token_ids=self._eos_token_ids,
            computes_whole_prompts=self._computes_whole_prompts,
        )

    def _has_foreground(self, plan: StepPlan) -> bool:
        """Whether the step may compute a foreground request. Every policy ranks background requests last."""
        first = self._running.in_order[:1]
        if plan.num_admissible:
            first = [*first, self._waiting.peek(plan.bucket(0))]
        return any(not sequence.request.is_background for sequence in first)

    def _decision(self, joined: list[EngineSequence], wait_reason: WaitReason) -> SchedulingDecision:
        preempted, self._preempted = self._preempted, []
        num_waiting = len(self._waiting)
        return SchedulingDecision(
            joined, preempted, wait_reason if num_waiting else None, num_waiting, self.pool.num_free,
            *self.fetches.take_notes(),
        )  # fmt: skip

    # -- running sequences

    def _participants(self, *, is_ahead: bool) -> list[EngineSequence]:
        """Return a new list of running sequences, excluding those whose last token is drawn by the step in flight."""
        if is_ahead:
            # `or 1` keeps a sequence that generates nothing, until its prompt is computed.
            return [s for s in self._running if len(s.generated_token_ids) < (s.request.sampling.max_tokens or 1)]
        return list(self._running)

    def _schedule_running(self, builder: BatchBuilder, running: list[EngineSequence]) -> None:
        block_size = self.pool.block_size
        num_behind = len(running)
        for sequence in running:
            num_behind -= 1
            if builder.has_preempted and not sequence.is_running:
                continue  # it was preempted for a sequence earlier in the order
            if sequence.is_decoding:  # fast path for the common case: one more token, and rarely another block
                if sequence.num_computed_tokens % block_size or self._make_room(sequence, 1, builder):
                    builder.add_decoding(sequence)
                continue
            # Reserve one token for each later sequence, so that a long prompt never stalls another sequence's decoding.
            num_tokens = builder.chunk(sequence, num_reserved=num_behind)
            if num_tokens > 0 and self._make_room(sequence, num_tokens, builder):
                builder.add_prefill(sequence, num_tokens)

    def _make_room(self, sequence: EngineSequence, num_tokens: int, builder: BatchBuilder) -> bool:
        """Allocate the blocks for `num_tokens` more tokens, preempting the lowest-ranked sequences if blocks are short.

        Returns False if the sequence itself was preempted.
        """
        while not self._running.has_room_for(sequence, num_tokens):
            builder.has_preempted = True
            victim = self._running.last
            self._preempt(victim)
            self._totals.memory_preemptions += 1
            if victim is sequence:
                return False
        self._running.extend(sequence, num_tokens)
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        """Release a running sequence's blocks and queue it at its old position. Its tokens are recomputed later."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._totals.preemptions += 1
        self._preempted.append(sequence)
        self._strategy.preempted(sequence)
        self._wait(sequence)

    def release_memory(self) -> None:
        """Preempt every running sequence, cancel every fetch, and clear the prefix cache."""
        while len(self._running):
            self._preempt(self._running.last)
        for sequence in self.fetches.give_up():
            self._wait(sequence)
        self.pool.clear_cache()

    # -- waiting sequences

    def _admit(self, builder: BatchBuilder, plan: StepPlan, now: float) -> WaitReason:
        """Add waiting sequences to the step, in order, while they may join. Return why the next one cannot join.

        The first sequence waits until all of its known tokens have room, and no later sequence overtakes it.
        """
        for number in range(plan.num_admissible):
            bucket = plan.bucket(number)
            sequence = self._waiting.peek(bucket)
            if not builder.has_room_for_prefill(sequence):
                return WaitReason.BUDGET
            if not self._strategy.admits(sequence):
                return WaitReason.STRATEGY
            if sequence.has_unknown_token:
                return WaitReason.RESULT
            if sequence.is_scoring and not builder.has_room_for_scores:
                return WaitReason.BUDGET
            cached, num_blocks = self._running.blocks_to_join(sequence)
            if not (self.pool.can_allocate(num_blocks) and self._running.can_begin(cached)):
                return WaitReason.BLOCKS
            tokens_per_s = self.throughput.tokens_per_s_at(self.limits.prefill_chunk_tokens)
            if self.fetches.begin(sequence, cached, now=now, tokens_per_s=tokens_per_s):
                self._waiting.pop(bucket)
                continue
            self._join(sequence, cached, bucket)
            num_tokens = builder.chunk(sequence)
            self._running.extend(sequence, num_tokens)
            builder.add_prefill(sequence, num_tokens)
        return WaitReason.SLOTS if len(self._running) >= self.limits.max_running else WaitReason.STRATEGY

    def _join(self, sequence: EngineSequence, cached: list[Block], bucket: int) -> None:
        """Start the first waiting sequence after its cached prefix. The pool must have room for all of its tokens."""
        self._running.share(sequence, cached)
        self._waiting.pop(bucket)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._totals.prompt_tokens += sequence.num_prompt_tokens
            self._totals.cached_tokens += sequence.num_cached_tokens
            if sequence.states is not None:
                num_unresumable = sequence.states.num_matched_tokens - sequence.num_cached_tokens
                self._totals.unresumable_tokens += num_unresumable
        sequence.order_key = self._policy.order_key(sequence)
        self._running.add(sequence)
        self._policy.joined(sequence)
        self._strategy.joined(sequence)

    def _to_preempt_for_waiting(self, num_slots: int) -> list[EngineSequence]:
        """Return the running sequences to preempt for waiting ones: background ones, or any that the policy allows."""
        if not (len(self._waiting) and len(self._running) and self._strategy.joins_any_step):
            return []
        # Background requests rank last, and every policy lets foreground requests preempt them.
        if not (self._policy.preempts or self._running.last.request.is_background):
            return []
        first = self._waiting.peek()
        victims = self._running.to_preempt_for(first, may_preempt=self._policy.may_preempt, max_running=num_slots)
        if first.request.is_background:
            return victims
        return victims + self._more_background_to_preempt(victims, num_slots)

    def _more_background_to_preempt(self, victims: list[EngineSequence], num_slots: int) -> list[EngineSequence]:
        """Return more background sequences to preempt, so that a burst of foreground requests can join in one step."""
        num_free = num_slots - len(self._running) + len(victims)
        num_missing = self._waiting.num_foreground - num_free
        if num_free <= 0 or num_missing <= 0:
            return []
        background = [each for each in self._running if each.request.is_background and each not in victims]
        return background[-num_missing:]

    # ------------------------------------------------------------------ update

    def with_history(self, batch: StepBatch) -> StepBatch:
        """Complete a batch that lacked history, after `update` has processed the previous step."""
        scheduled = [
            with_history(item, sequence, self._eos_token_ids) if item.lacks_history else item
            for item, sequence in zip(batch.scheduled, batch.sequences, strict=True)
        ]
        return replace(batch, scheduled=tuple(scheduled))

    def update(
        self, batch: StepBatch, result: StepResult, *, now: float, is_committed: bool = False
    ) -> list[TokenDelta]:
        """Process a step's result. Returns the deltas of sequences that ended without a step, then those of the batch.

        A sequence that ends here may already be in the next batch. The token that this batch draws for it is discarded.
        """
        num_drawn, num_sampled = len(result.token_ids), sum(result.num_kept) or len(batch.sampled)
        assert num_drawn == num_sampled, f"{num_drawn} tokens for {num_sampled} sequences"
        self._finish_overdue(now)  # tokens that arrive after the deadline are not delivered
        deltas, self._ended = self._ended, []
        if batch:
            num_ended = len(deltas) - self._totals.finished
            processed = self._results.process(batch, result, is_committed=is_committed)
            self._totals.generated_tokens += sum([len(delta.token_ids) for delta in processed])
            self._note_step(batch, result, now, num_ended=num_ended + self._totals.finished)
            deltas += processed
        return deltas

    def _note_step(self, batch: StepBatch, result: StepResult, now: float, *, num_ended: int) -> None:
        num_tokens = batch.num_scheduled_tokens
        self.throughput.note_step(now, began_at=batch.began_at, num_tokens=num_tokens, num_ended=num_ended)
        self._totals.steps += 1
        if batch.has_drafts:
            self._totals.drafted_tokens += num_tokens - len(batch.sequences)
            self._totals.accepted_tokens += len(result.token_ids) - len(batch.sequences)
        if self.drafter is not None:
            self.drafter.stepped(batch, result, seconds=self.throughput.last_gap_s)
        self._policy.computed(batch, result.num_kept)
        if not len(self._running):
            self._strategy.emptied(now)

    # ------------------------------------------------------------------ between two steps

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use new settings from the next step on. No request is lost.

        A strategy or policy with unchanged settings keeps its state. Running sequences continue; those beyond the new
        `max_running` are preempted.
        """
        is_new_policy, is_new_strategy = config.policy != self.config.policy, config.strategy != self.config.strategy
        self.config, self._settings = config, config.version
        self.limits = StepLimits.of(config)
        if is_new_policy or is_new_strategy:
            waiting = self._waiting.take_all()
            self._policy = make_policy(config.policy) if is_new_policy else self._policy
            self._strategy = make_strategy(config.strategy) if is_new_strategy else self._strategy
            self._waiting = WaitingQueue(self._policy.new_queue, self._strategy.bucket_of)
            self._running.reorder(self._policy.order_key)
            for sequence in waiting:
                self._wait(sequence)
        while len(self._running) > config.max_running:
            self._preempt(self._running.last)

    def stats(self) -> EngineStats:
        has_slot = not len(self._waiting) and len(self._running) < self.limits.max_running
        return EngineStats(
            strategy=self.config.strategy.name,
            policy=self.config.policy.name,
            settings=self._settings,
            batch_size=self._strategy.batch_size(self.limits.max_running),
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self.fetches),
            num_waiting_tokens=self._waiting.num_tokens,
            num_waiting_foreground_tokens=self._waiting.num_foreground_tokens,
            num_background=self._running.num_background + len(self._waiting) - self._waiting.num_foreground,
            num_unpreemptible_background=0 if self._strategy.joins_any_step else self._running.num_background,
            estimated_wait_s=0.0 if has_slot else self.expected_wait_s(self._waiting.work),
            ended_per_s=self.throughput.ended_per_s,
            mean_length_error_tokens=self._mean_length_error,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            num_layer_groups=self.pool.num_groups,
            block_size=self.pool.block_size,
            max_running=self.limits.max_running,
            speed=self.throughput.tokens_per_s_at(SPEED_STEP_TOKENS),
            **self._totals.exported(),
            num_state_slots=0 if self.pool.states is None else self.pool.states.num_slots,
            num_free_state_slots=0 if self.pool.states is None else self.pool.states.num_free,
        )

    @property
    def num_outstanding_tokens(self) -> int:
        """Prompt and predicted output tokens that remain to be computed for all requests. Thread-safe."""
        return self._waiting.work + sum([each.remaining_work for each in list(self._running)])

    # ------------------------------------------------------------------ for views

    @property
    def running(self) -> list[EngineSequence]:
        """The running sequences in order. The caller must not change the list."""
        return self._running.in_order

    def first_waiting(self, number: int) -> list[EngineSequence]:
        """See `WaitingQueue.first`."""
        return self._waiting.first(number)

    def expected_wait_s(self, num_tokens: int) -> float:
        """Return how many seconds a request behind `num_tokens` of work waits to join, at the recent throughput."""
        tokens_per_s, ended_per_s = self.throughput.tokens_per_s, self.throughput.ended_per_s
        if not tokens_per_s:
            return 0.0
        return max(num_tokens / tokens_per_s, 1.0 / ended_per_s if ended_per_s else 0.0)
