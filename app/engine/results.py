"""Books what steps drew: computed tokens, full blocks, new tokens, ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from app.engine.batch import Batch
from app.engine.blocks import BlockPool
from app.engine.request import FinishReason, TokenDelta
from app.engine.sequence import Sequence, SequenceStatus


class Results:
    """Turns drawn tokens into deltas. Who gets the last token is handed to `end`, with how many it has."""

    def __init__(self, pool: BlockPool, end: Callable[[Sequence, int], None]) -> None:
        self._pool = pool
        self._end = end

    def book(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
        """A batch was computed and drew these tokens, one for each of `batch.sampled`."""
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
        return deltas

    def advance(self, batch: Batch) -> None:
        """Count a batch as computed before its tokens are known: -1 - n stands for the token of `batch.sampled[n]`."""
        unknown = count(-1, -1)
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            sequence.num_computed_tokens = item.end
            if item.samples:
                sequence.generated_token_ids.append(next(unknown))

    def retreat(self, batch: Batch) -> None:
        """Take back that a batch has advanced."""
        for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
            if item.samples:
                sequence.generated_token_ids.pop()
            if item.block_ids is sequence.block_ids:  # else it was preempted since, and nothing counts as computed
                sequence.num_computed_tokens = item.start

    def book_advanced(self, batch: Batch, token_ids: list[int]) -> list[TokenDelta]:
        """As `book`, of a batch that has advanced: the tokens take the place of those that stand for them."""
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
        if sequence.matcher is not None:
            sequence.matcher.advance(token_id)
        if token_id in sequence.end_token_ids:
            reason = FinishReason.STOP
        elif num_generated >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        else:  # by position: names take twice as long, and most tokens end here
            return TokenDelta(request.request_id, (token_id,), None, None, sequence.num_cached_tokens)
        self._end(sequence, num_generated)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached_tokens,
        )
