"""A step in the making: what is left of its budget, and each sequence's share of it."""

from __future__ import annotations

from app.engine.batch import Batch, HoldUp, ScheduledSequence, TokenHistory
from app.engine.sequence import Sequence


class Step:
    """Sequences are added in order of precedence, and charged to the budget."""

    def __init__(
        self,
        *,
        budget: int,
        max_prefill_tokens: int | None,
        max_background_tokens: int | None,
        chunk_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`max_prefill_tokens` of the budget may go to prompts, `chunk_tokens` to one of them, `max_background_tokens`
        to those of background requests."""
        self._budget = budget
        self.num_tokens_left = budget
        self._num_prefill_tokens_left = budget if max_prefill_tokens is None else max_prefill_tokens
        self._num_background_tokens_left = budget if max_background_tokens is None else max_background_tokens
        self._chunk_tokens = chunk_tokens
        self._eos_token_ids = eos_token_ids
        self.has_preempted = False
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # one for each of `scheduled`
        self.joined: list[Sequence] = []

    def has_room_for_prefill(self, sequence: Sequence) -> bool:
        """Whether the step may take any of a prompt."""
        return self.num_tokens_left > 0 and self._num_prompt_tokens_left(sequence) > 0

    def chunk(self, sequence: Sequence, *, num_reserved: int = 0) -> int:
        """How many tokens of a prompt the step takes, when so many of the budget are for others."""
        return min(
            sequence.num_uncomputed_tokens,
            self._chunk_tokens,
            self.num_tokens_left - num_reserved,
            self._num_prompt_tokens_left(sequence),
        )

    def _num_prompt_tokens_left(self, sequence: Sequence) -> int:
        if sequence.request.is_background:
            return min(self._num_prefill_tokens_left, self._num_background_tokens_left)
        return self._num_prefill_tokens_left

    def add_decoding(self, sequence: Sequence) -> None:
        """The last token of a sequence; its block is there."""
        self.scheduled.append(_decoding(sequence) if sequence.draws_freely else self._share(sequence, 1))
        self.sequences.append(sequence)
        self.num_tokens_left -= 1

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """The next tokens of a prompt; their blocks are there."""
        self.scheduled.append(self._share(sequence, num_tokens))
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        self._num_prefill_tokens_left -= num_tokens
        self._num_background_tokens_left -= num_tokens if sequence.request.is_background else 0

    def batch(
        self, *, now: float, preempted: list[Sequence], hold_up: HoldUp | None, num_waiting: int, num_free_blocks: int
    ) -> Batch:
        """What the model runner is given."""
        return Batch(
            tuple(self.scheduled),
            tuple(self.sequences),
            began_at=now,
            num_scheduled_tokens=self._budget - self.num_tokens_left,
            joined=tuple(self.joined),
            preempted=tuple(preempted),
            hold_up=hold_up,
            num_waiting=num_waiting,
            num_free_blocks=num_free_blocks,
        )

    def _share(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
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


def _decoding(sequence: Sequence) -> ScheduledSequence:
    """The share of a sequence that is decoding and draws freely; what `Step._share` gives, only sooner."""
    request = sequence.request
    return ScheduledSequence(  # by position: names take twice as long
        request.request_id,
        (sequence.generated_token_ids[-1],),
        sequence.num_computed_tokens,
        sequence.block_ids,
        True,
        request.sampling,
    )
