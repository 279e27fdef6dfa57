"""Builds the batch of one step under its token budget, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence as Several

from msgspec import structs

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import Pooling, SamplingParams
from app.engine.sequence import Sequence

# Prompt tokens of one step that get log-probabilities, at most. Each takes a row of logits: 300 MB in all with a
# vocabulary of 150,000 tokens. A longer prompt takes more steps.
MAX_SCORED_TOKENS = 512


class BatchBuilder:
    """Takes sequences in order of precedence and charges them to the budget."""

    def __init__(
        self,
        *,
        budget: int,
        max_prefill_tokens: int | None,
        max_background_tokens: int | None,
        chunk_tokens: int,
        eos_token_ids: frozenset[int],
        takes_whole_prompts: bool = False,
    ) -> None:
        """`max_prefill_tokens` of the budget may go to prompts, `chunk_tokens` to one of them, `max_background_tokens`
        to those of background requests. Whole prompts are not divided: one above a limit has a step of its own.
        """
        self._budget = budget
        self.num_tokens_left = budget
        self._num_prefill_tokens_left = budget if max_prefill_tokens is None else max_prefill_tokens
        self._num_background_tokens_left = budget if max_background_tokens is None else max_background_tokens
        self._chunk_tokens = chunk_tokens
        self._takes_whole_prompts = takes_whole_prompts
        self._num_scored_tokens_left = MAX_SCORED_TOKENS
        self._has_logprobs = False
        self._has_pooling = False
        self._eos_token_ids = eos_token_ids
        self._has_drafts = False
        self.has_preempted = False
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # one for each of `scheduled`

    def has_room_for_prefill(self, sequence: Sequence) -> bool:
        """Whether the step may take any token of a prompt, or all of a whole one."""
        if self._takes_whole_prompts:
            return self._has_room_for_all(sequence)
        return self.num_tokens_left > 0 and self._num_prompt_tokens_left(sequence) > 0

    @property
    def has_single_tokens(self) -> bool:
        """Whether there are sequences, each with one token, and room for more tokens."""
        return 0 < len(self.sequences) == self._budget - self.num_tokens_left < self._budget

    @property
    def has_room_for_scores(self) -> bool:
        return self._num_scored_tokens_left > 0

    def chunk(self, sequence: Sequence, *, num_reserved: int = 0) -> int:
        """How many tokens of a prompt the step takes, with `num_reserved` of the budget kept for others."""
        if self._takes_whole_prompts:
            return sequence.num_uncomputed_tokens if self._has_room_for_all(sequence) else 0
        num_tokens = min(
            sequence.num_uncomputed_tokens,
            self._chunk_tokens,
            self.num_tokens_left - num_reserved,
            self._num_prompt_tokens_left(sequence),
        )
        return min(num_tokens, self._num_scorable(sequence)) if sequence.is_scoring else num_tokens

    def _has_room_for_all(self, sequence: Sequence) -> bool:
        num_left = min(self.num_tokens_left, self._num_prompt_tokens_left(sequence))
        return sequence.num_uncomputed_tokens <= num_left or not self.scheduled

    def _num_scorable(self, sequence: Sequence) -> int:
        """How many tokens the step may compute: up to the prompt token that it may no longer score."""
        start = sequence.num_computed_tokens
        end = max(start, sequence.num_scored_tokens) + self._num_scored_tokens_left
        return sequence.num_uncomputed_tokens if end >= sequence.num_prompt_tokens - 1 else end - start

    def _num_prompt_tokens_left(self, sequence: Sequence) -> int:
        if sequence.request.is_background:
            return min(self._num_prefill_tokens_left, self._num_background_tokens_left)
        return self._num_prefill_tokens_left

    def add_decoding(self, sequence: Sequence) -> None:
        """Add the last token of a sequence; its block is allocated."""
        if sequence.has_plain_sampling:  # the common case: equals `_scheduled_sequence`, but is faster
            request = sequence.request
            scheduled = ScheduledSequence(  # by position: names take longer
                request.request_id,
                (sequence.generated_token_ids[-1],),
                sequence.num_computed_tokens,
                sequence.block_ids,
                True,
                request.sampling,
                (),
                None,
                sequence.matcher,
                sequence.lacks_history,
                (),
                0,
                None,
                None if sequence.adapter is None else sequence.adapter.weights,
            )
        else:
            scheduled = self._scheduled_sequence(sequence, 1)
        if sequence.wants_logprobs:
            self._has_logprobs = True
        self.scheduled.append(scheduled)
        self.sequences.append(sequence)
        self.num_tokens_left -= 1

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the next tokens of a prompt; their blocks are allocated."""
        self.scheduled.append(self._scheduled_sequence(sequence, num_tokens))
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        self._num_prefill_tokens_left -= num_tokens
        self._num_background_tokens_left -= num_tokens if sequence.request.is_background else 0

    def add_drafts(self, place: int, drafts: Several[int]) -> None:
        """Add drafts to what the step computes of a sequence that decodes, as do all others; it has the blocks."""
        item, sequence = self.scheduled[place], self.sequences[place]
        is_simple = sequence.has_plain_sampling and item.matcher is None
        draws = () if is_simple else expand_drafts(item, sequence, drafts, self._eos_token_ids)
        self.scheduled[place] = structs.replace(item, token_ids=(*item.token_ids, *drafts), draws=draws)
        self.num_tokens_left -= len(drafts)
        self._has_drafts = True

    def build(self, *, began_at: float) -> StepBatch:
        """The batch for the model runner."""
        return StepBatch(
            tuple(self.scheduled),
            tuple(self.sequences),
            began_at=began_at,
            num_scheduled_tokens=self._budget - self.num_tokens_left,
            has_logprobs=self._has_logprobs,
            has_pooling=self._has_pooling,
            has_preempted=self.has_preempted,
            has_drafts=self._has_drafts,
        )

    def _scheduled_sequence(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        sampling = sequence.request.sampling
        samples = num_tokens == sequence.num_uncomputed_tokens and sampling.max_tokens > 0
        knows_all = samples and not sequence.lacks_history
        first_target, targets = self._targets(sequence, start + num_tokens) if sequence.is_scoring else (0, ())
        scheduled = ScheduledSequence(
            sequence.request.request_id,
            sequence.token_ids(start, start + num_tokens),
            start,
            sequence.block_ids,
            samples,
            sampling,
            banned_token_ids=_banned(sequence, self._eos_token_ids) if knows_all else (),
            adjustments=sequence.current_adjustments() if knows_all else None,
            targets=targets,
            first_target=first_target,
            pooling=_pooling(sequence, start + num_tokens),
            second_text_at=sequence.request.second_text_at,
            matcher=sequence.matcher if samples else None,
            lacks_history=samples and sequence.lacks_history,
            adapter=None if sequence.adapter is None else sequence.adapter.weights,
        )
        if scheduled.wants_logprobs:
            self._has_logprobs = True
        if scheduled.pooling is not None:
            self._has_pooling = True
        return scheduled

    def _targets(self, sequence: Sequence, end: int) -> tuple[int, tuple[int, ...]]:
        """The prompt tokens that are scored when the step computes up to `end`, after the position of the first."""
        first = max(sequence.num_computed_tokens, sequence.num_scored_tokens) + 1
        targets = sequence.request.prompt_token_ids[first : end + 1]
        self._num_scored_tokens_left -= len(targets)
        return first, targets


def with_history(item: ScheduledSequence, sequence: Sequence, eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """An item that lacked history, once the token before its draw is known. Of a sequence that ended with that token,
    any draw will do: it is discarded."""
    if sequence.is_finished:
        return structs.replace(item, lacks_history=False, matcher=None)
    return structs.replace(
        item,
        lacks_history=False,
        banned_token_ids=_banned(sequence, eos_token_ids),
        adjustments=sequence.current_adjustments(),
    )


def expand_drafts(
    item: ScheduledSequence, sequence: Sequence, drafts: Several[int], eos_token_ids: frozenset[int]
) -> tuple[ScheduledSequence, ...]:
    """An item with one token, and that item behind each draft: penalties, bans and matcher as they are there."""
    draws, generated = [item], list(sequence.generated_token_ids)
    for draft in drafts:
        generated.append(draft)
        draws.append(behind_draft(draws[-1], generated, eos_token_ids))
    return tuple(draws)


def behind_draft(item: ScheduledSequence, generated: list[int], eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """An item with the last of these generated tokens, a draft, behind it."""
    draft = generated[-1]
    return structs.replace(
        item,
        token_ids=(*item.token_ids, draft),
        banned_token_ids=banned_token_ids(item.sampling, generated, eos_token_ids),
        adjustments=None if item.adjustments is None else item.adjustments.after(draft),
        matcher=None if item.matcher is None else item.matcher.after(draft),
    )


def _banned(sequence: Sequence, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Those that may not be drawn behind all tokens of a sequence, which must be known."""
    return banned_token_ids(sequence.request.sampling, sequence.generated_token_ids, eos_token_ids)


def banned_token_ids(sampling: SamplingParams, generated: list[int], eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """The tokens that may not be drawn behind these generated ones."""
    banned = _ends_of_bad_words(sampling.bad_words, generated) if sampling.bad_words else ()
    if len(generated) < sampling.min_tokens:
        return (*banned, *eos_token_ids, *sampling.stop_token_ids)
    if sampling.ignore_eos and sampling.grammar is not None:  # only a grammar that is complete may draw them
        return (*banned, *eos_token_ids)
    return banned


def _ends_of_bad_words(bad_words: tuple[tuple[int, ...], ...], generated: list[int]) -> tuple[int, ...]:
    """The tokens that would complete one of the words after the tokens generated so far."""
    last = generated[-1] if generated else None
    return tuple([word[-1] for word in bad_words if len(word) == 1 or (word[-2] == last and _ends(generated, word))])


def _ends(generated: list[int], word: tuple[int, ...]) -> bool:
    """Whether the next token may complete the word."""
    return tuple(generated[1 - len(word) :]) == word[:-1]


def _pooling(sequence: Sequence, end: int) -> Pooling | None:
    """Which hidden states the embedding needs of a step that computes up to `end`."""
    pooling = sequence.request.pooling
    return None if pooling == Pooling.LAST and end < sequence.num_prompt_tokens else pooling
