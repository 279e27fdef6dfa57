"""Applies each step's result to its sequences: counts computed tokens, caches full blocks, and adds new tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice

from msgspec import structs

from app.engine.batch import StepBatch, StepResult
from app.engine.block_pool import BlockPool
from app.engine.request import FinishReason, Pooling, TokenDelta, TokenLogprobs
from app.engine.sequence import EngineSequence, SequenceStatus


class ResultProcessor:
    """Turns drawn tokens into deltas. Calls `end` with each finished sequence and its number of generated tokens."""

    def __init__(self, pool: BlockPool, end: Callable[[EngineSequence, int], None]) -> None:
        self._pool = pool
        self._end = end

    def process(self, batch: StepBatch, result: StepResult, *, is_committed: bool) -> list[TokenDelta]:
        """Apply the result of a computed batch. Returns a delta for each request that has new tokens or has ended.

        For a batch with drafts, the result contains only accepted tokens. The KV of rejected drafts does not count and
        is overwritten by the next step. If `is_committed`, the tokens replace the placeholders of `InFlight.commit`.
        """
        has_states, epoch = self._pool.states is not None, batch.epoch
        block_size, finished, has_drafts = self._pool.block_size, SequenceStatus.FINISHED, batch.has_drafts
        scores = _newly_scored(batch, result) if batch.has_logprobs else {}
        predicted = _predicted(batch, result) if has_drafts else {}
        # The tokens of each sequence that samples; without drafts, zip makes tuples of one token.
        drawn: Iterator[tuple[int, ...]] = _kept(result) if has_drafts else zip(result.token_ids, strict=False)
        logprobs, has_pooling, drawn_delta = result.logprobs, batch.has_pooling, self._drawn
        deltas: list[TokenDelta] = []
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            token_ids = next(drawn) if item.samples else ()
            if sequence.status is finished:
                continue  # aborted, expired or failed while the step was running
            end = item.start + len(token_ids if has_drafts else item.token_ids)  # cheaper than `item.end`
            is_decoding = has_states and sequence.is_decoding
            generated = sequence.generated_token_ids
            if is_committed and token_ids:
                num_generated = end - sequence.num_prompt_tokens + 1
                generated[num_generated - 1] = token_ids[0]
            else:
                generated += token_ids
                num_generated = len(generated)
            is_current = sequence.epoch <= epoch
            if is_current:
                if not is_committed:
                    sequence.num_computed_tokens = end
                if end >= (len(sequence.prefixes) + 1) * block_size:
                    self.cache_full_blocks(sequence, end)
                if has_states:
                    self._advance_states(sequence, end, generates=is_decoding)
                if has_pooling:
                    _pool(sequence, result)
            if token_ids:
                likely = logprobs.get(item.request_id, ()) if logprobs else ()
                deltas.append(drawn_delta(sequence, token_ids, num_generated, likely))
            elif end == sequence.num_tokens and (is_current or sequence.request.pooling is None):
                deltas.append(self._computed(sequence))
        if predicted:
            deltas = [_with_predicted(delta, predicted) for delta in deltas]
        return _with_scores(deltas, scores) if scores else deltas

    def _advance_states(self, sequence: EngineSequence, end: int, *, generates: bool) -> None:
        """Advance a sequence's recurrent states to the state after `end` tokens, and publish its new snapshots."""
        states, size = sequence.states, self._pool.block_size
        assert self._pool.states is not None, "the model has recurrent layers"
        assert states is not None, "the sequence runs"
        with_snapshot = [sequence.prefixes[number // size - 1] for number, _ in states.new if number <= end]
        self._pool.states.advance(states, end, with_snapshot, generates=generates)

    def cache_full_blocks(self, sequence: EngineSequence, num_computed_tokens: int) -> None:
        """Cache the blocks that the computed tokens fill, to share them. Free the blocks that have left a window."""
        size, windows = self._pool.block_size, sequence.windows
        for index in range(len(sequence.prefixes), num_computed_tokens // size):
            parent = sequence.prefixes[-1] if sequence.prefixes else sequence.request.prefix_salt
            content = sequence.token_ids(index * size, (index + 1) * size)
            block, tenant = sequence.blocks[index], sequence.request.tenant
            prefix = self._pool.cache_full_block(block, content, parent=parent, tenant=tenant)
            sequence.prefixes.append(prefix)
            if windows is not None:
                self._pool.cache_in_windows((blocks[index] for blocks in windows.blocks), prefix)
        if windows is not None:
            self._pool.free(windows.release_before(self._pool.first_in_window(num_computed_tokens)))

    def _drawn(
        self,
        sequence: EngineSequence,
        token_ids: tuple[int, ...],
        num_generated: int,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> TokenDelta:
        """Return the delta for new tokens. Only the last of them can be an end token, which ends the sequence."""
        request = sequence.request
        if sequence.matcher is not None:
            for token_id in token_ids:
                sequence.matcher.advance(token_id)
        last = token_ids[-1]
        if last in sequence.end_token_ids:
            reason = FinishReason.STOP
        elif num_generated >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        else:  # the common case
            return TokenDelta(
                request.request_id, token_ids, None, None, sequence.num_cached_tokens, None, None, logprobs
            )
        self._end(sequence, num_generated)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=last if reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached_tokens,
            logprobs=logprobs,
        )

    def _computed(self, sequence: EngineSequence) -> TokenDelta:
        """End a sequence that generates nothing, after its prompt was computed, and return its last delta."""
        embedding = _embedding(sequence)
        self._end(sequence, 0)
        return TokenDelta(
            sequence.request.request_id,
            (),
            FinishReason.LENGTH if sequence.request.pooling is None else FinishReason.STOP,
            num_cached_tokens=sequence.num_cached_tokens,
            embedding=embedding,
        )


def _kept(result: StepResult) -> Iterator[tuple[int, ...]]:
    """Yield the accepted tokens of each sequence of a step with drafts."""
    token_ids = iter(result.token_ids)
    return (tuple(islice(token_ids, number)) for number in result.num_kept)


def _pool(sequence: EngineSequence, result: StepResult) -> None:
    """Add a step's pooled hidden states to `EngineSequence.pooled`."""
    new = result.pooled.get(sequence.request.request_id)
    if new is not None:
        before = sequence.pooled
        sequence.pooled = new if before is None else [sum(both) for both in zip(before, new, strict=True)]


def _embedding(sequence: EngineSequence) -> bytes | None:
    """Return the embedding of a computed sequence, or None in a replay, which computes no hidden states."""
    if sequence.pooled is None:
        return None
    divisor = sequence.num_prompt_tokens if sequence.request.pooling == Pooling.MEAN else 1
    return array("f", [value / divisor for value in sequence.pooled]).tobytes()


Predicted = dict[str, tuple[int, int]]  # accepted and rejected drafts from a request's prediction, by request id


def _predicted(batch: StepBatch, result: StepResult) -> Predicted:
    return {
        item.request_id: (num_kept - 1, len(item.token_ids) - num_kept)
        for item, sequence, num_kept in zip(batch.scheduled, batch.sequences, result.num_kept, strict=True)
        if len(item.token_ids) > 1 and sequence.drafts is not None and sequence.drafts.are_predicted
    }


def _with_predicted(delta: TokenDelta, predicted: Predicted) -> TokenDelta:
    if delta.request_id not in predicted:
        return delta
    num_accepted, num_rejected = predicted[delta.request_id]
    return structs.replace(delta, num_accepted=num_accepted, num_rejected=num_rejected)


Scores = dict[str, tuple[TokenLogprobs, ...]]  # log-probabilities of prompt tokens, by request id


def _newly_scored(batch: StepBatch, result: StepResult) -> Scores:
    """Return the log-probabilities of newly scored prompt tokens, and count these tokens as scored."""
    scores: Scores = {}
    if not batch.has_targets:
        return scores
    for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
        if not item.targets or sequence.is_finished:
            continue
        # A step that was launched before a preemption may have already scored the first targets.
        num_known = sequence.num_scored_tokens - (item.first_target - 1)
        new = result.prompt_logprobs.get(item.request_id, ())[num_known:]
        sequence.num_scored_tokens += max(0, len(item.targets) - num_known)
        if new:
            scores[item.request_id] = new
    return scores


def _with_scores(deltas: list[TokenDelta], scores: Scores) -> list[TokenDelta]:
    """Add the scores to their requests' deltas. A request without a delta gets one that contains only the scores."""
    scored_deltas = [
        structs.replace(delta, prompt_logprobs=scores.pop(delta.request_id)) if delta.request_id in scores else delta
        for delta in deltas
    ]
    return scored_deltas + [TokenDelta(request_id, (), prompt_logprobs=scored) for request_id, scored in scores.items()]
