"""The batch of one step, the builder that fills a batch up to its token budget, and the result of a step.

A model runner reads a batch and does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from app.config import SchedulerConfig
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import Matcher, allowed_after_bans
from app.engine.request import Pooling, SamplingParams, TokenLogprobs
from app.engine.sequence import EngineSequence
from app.engine.state_pool import StatePath


class ScheduledSequence(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The part of one sequence that a step computes: `token_ids` at positions `start`, `start + 1`, …

    If `samples` is true, the tokens reach the end of the sequence and the step draws the next token. A negative token
    id -1 - n is the token that the previous step draws for `sampled[n]`; only runners that launch steps get such ids.
    A step makes a thousand of these objects: creating a struct takes a third of the time of a dataclass, and the
    garbage collector does not track it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: list[int]  # in token order; the blocks cover at least start + len(token_ids) tokens
    samples: bool
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()  # may not be drawn: end tokens before min_tokens, ends of bad words
    adjustments: LogitAdjustments | None = None  # penalties and biases at this step; None if the request has none
    matcher: Matcher | None = None  # decides which tokens may be drawn; None allows all tokens
    # The draw depends on the previous token, which is still being drawn (`SamplingParams.needs_output_history`).
    # `Scheduler.with_history` updates penalties, bans and matcher when that token is known.
    lacks_history: bool = False
    # Consecutive prompt tokens whose log-probabilities are wanted, and the position of the first. This step computes
    # the token before each target, because that token predicts the target.
    targets: tuple[int, ...] = ()
    first_target: int = 0
    # The wanted hidden states: the last token's, or the sum over all tokens.
    pooling: Pooling | None = None
    adapter: object = None  # the object that the model runner's `load_adapter` returned
    window_ids: tuple[list[int], ...] = ()  # `block_ids` of each window group; blocks before the window may be reused
    states: StatePath | None = None  # for a model with recurrent layers
    second_text_at: int = 0  # see `Request.second_text_at`
    # With drafts, and if a draw depends on the tokens before it: copies of this item that end at each of its tokens.
    draws: tuple[ScheduledSequence, ...] = ()

    def ids_of(self, group: int) -> list[int]:
        """Return the block ids of a group. Group 0 looks back to the start, the other groups to a window."""
        return self.window_ids[group - 1] if group else self.block_ids

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the drawn token or of prompt tokens are wanted."""
        return bool(self.targets) or (self.samples and self.sampling.logprobs is not None)

    @property
    def end(self) -> int:
        """Tokens in the KV cache after this step, which is also the position of the drawn token."""
        return self.start + len(self.token_ids)

    @property
    def takes_all_logits(self) -> bool:
        """Whether the sampler uses the model's logits unchanged."""
        return self.adjustments is None and self.matcher is None and not self.banned_token_ids

    def allowed(self) -> bytes:
        """Return the tokens that the matcher allows, without banned tokens, as bits (see `Matcher.allowed`)."""
        assert self.matcher is not None, "without a matcher all tokens may be drawn"
        if not self.banned_token_ids:
            return self.matcher.allowed()
        return allowed_after_bans(self.matcher, self.banned_token_ids)


class WaitReason(StrEnum):
    """Why the first waiting sequence did not join a step."""

    SLOTS = "slots"  # `max_running` sequences run
    BLOCKS = "blocks"  # KV memory has too few free blocks, or the model too few free state slots
    BUDGET = "budget"  # the step has no budget left for prefill or for prompt log-probabilities
    STRATEGY = "strategy"  # the strategy waits for a timer, for the running batch, or for prompts of similar length
    RESULT = "result"  # the sequence was preempted, and its last token is still being drawn


class SchedulingDecision(NamedTuple):
    """The scheduler's decisions about a step, for the trace."""

    joined: Sequence[EngineSequence] = ()  # sequences that started to run with this step
    preempted: Sequence[EngineSequence] = ()  # sequences that were preempted since the previous step was scheduled
    wait_reason: WaitReason | None = None  # why the first waiting sequence waits; None if no sequence waits
    num_waiting: int = 0  # waiting sequences after this step was scheduled
    num_free_blocks: int = 0  # free blocks after this step was scheduled
    # The fetches from a store that began with this step, and those that ended since the previous step. Each pair is
    # the arrival number of the sequence and a number of blocks: requested blocks, and usable blocks.
    fetching: Sequence[tuple[int, int]] = ()
    fetched: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class StepBatch:
    """The work of one step, in order of precedence."""

    scheduled: tuple[ScheduledSequence, ...]
    sequences: tuple[EngineSequence, ...]  # the scheduler's own records, one for each of `scheduled`
    began_at: float = 0.0  # when the step was scheduled, in seconds of the engine's clock
    epoch: int = 0  # `RunningSequences.epoch` when the step was scheduled
    decision: SchedulingDecision = field(default_factory=SchedulingDecision)
    num_scheduled_tokens: int = 0  # `num_tokens`, counted by the builder because summing over a thousand items is slow
    has_logprobs: bool = False  # any sequence wants log-probabilities of drawn tokens or of its prompt
    has_pooling: bool = False  # any sequence wants hidden states
    has_preempted: bool = False  # other sequences were preempted to free blocks for this batch
    # Every sequence decodes, and the tokens after its first are unverified drafts. The step draws a token after each
    # draft; see `kept_tokens`.
    has_drafts: bool = False
    # In an engine that launches ahead: no other step was in flight when this step was scheduled.
    launched_alone: bool = False

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)

    @cached_property
    def has_targets(self) -> bool:
        """Whether any sequence wants log-probabilities of prompt tokens."""
        return self.has_logprobs and any(item.targets for item in self.scheduled)

    @cached_property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The items for which the step draws a token. The step's result has one token id for each, in this order.

        With drafts, a sequence has one item for each of its tokens, and each item ends with that token.
        """
        if self.has_drafts:
            return tuple([each for item in self.scheduled for each in _items_by_draw(item)])
        return tuple([item for item in self.scheduled if item.samples])

    @cached_property
    def has_adapters(self) -> bool:
        """Whether any sequence uses an adapter."""
        return any(item.adapter is not None for item in self.scheduled)

    @cached_property
    def matchers(self) -> tuple[Matcher, ...]:
        """The matchers of the items for which the step draws a token."""
        items = self.sampled if self.has_drafts else self.scheduled
        return tuple([item.matcher for item in items if item.matcher is not None])

    @cached_property
    def lacks_history(self) -> bool:
        """Whether any draw depends on a token that is not known yet."""
        return any(item.lacks_history for item in self.scheduled)

    def part(self, which: slice) -> StepBatch:
        """Return a batch of some of the sequences."""
        scheduled = self.scheduled[which]
        return replace(
            self,
            scheduled=scheduled,
            sequences=self.sequences[which],
            num_scheduled_tokens=sum(len(item.token_ids) for item in scheduled),
            has_logprobs=any(item.wants_logprobs for item in scheduled),
            has_pooling=any(item.pooling is not None for item in scheduled),
        )

    def __bool__(self) -> bool:
        return bool(self.scheduled)


EMPTY_BATCH = StepBatch((), ())


def _items_by_draw(item: ScheduledSequence) -> Sequence[ScheduledSequence]:
    """Return copies of an item that end at each of its tokens."""
    if item.draws:
        return item.draws
    shorter = [structs.replace(item, token_ids=item.token_ids[:end]) for end in range(1, len(item.token_ids))]
    return [*shorter, item]


_EMPTY: Mapping[str, Any] = MappingProxyType({})


class StepResult(NamedTuple):
    """The result of a step. The mappings, by request id, have only requests for log-probabilities or embeddings."""

    token_ids: list[int]  # one for each item of the batch's `sampled`, in that order
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # of the drawn tokens
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = _EMPTY  # one for each of a sequence's `targets`
    pooled: Mapping[str, list[float]] = _EMPTY  # hidden states after the final norm: the last token's, or a sum
    num_kept: Sequence[int] = ()  # set by `kept_tokens`: the number of each sequence's draws that `token_ids` still has


def by_request(logprobs: Iterable[tuple[str, TokenLogprobs]]) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Group the log-probabilities of drawn tokens by request id, as `StepResult.logprobs` needs them."""
    found: dict[str, tuple[TokenLogprobs, ...]] = {}
    for request_id, each in logprobs:
        found[request_id] = (*found[request_id], each) if request_id in found else (each,)
    return found


class DeviceLost(Exception):
    """The device is unusable for the rest of this process. No request is at fault, and no other step is tried."""


# ---------------------------------------------------------------------- building


class StepLimits(NamedTuple):
    """The limits of a step, which the tuner adjusts. `max_running` is at most `max_step_tokens`."""

    max_step_tokens: int
    prefill_chunk_tokens: int
    max_running: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> StepLimits:
        """Return the configured limits. They are the upper bounds by which memory, graphs and workspaces are sized."""
        return cls(config.max_step_tokens, config.prefill_chunk_tokens, config.max_running)


# The maximum number of prompt tokens that get log-probabilities in one step. Each needs a row of logits: 300 MB
# together with a vocabulary of 150,000 tokens. A longer prompt takes more steps.
MAX_SCORED_TOKENS = 512
# The maximum number of sequences with more than one token (prompts or drafts) in a step that a GPU replays from a
# graph. Each may need an extra kernel program in every replay.
MAX_MULTI_TOKEN_SEQUENCES = 64


class BatchBuilder:
    """Builds a batch: adds sequences in order of precedence and charges their tokens to the budget."""

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
        """max_prefill_tokens, chunk_tokens, max_background_tokens: the tokens of the budget that all prompts, one
        prompt, and all prompts of background requests may use. takes_whole_prompts: do not divide prompts; a prompt
        above a limit gets a step of its own.
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
        self.sequences: list[EngineSequence] = []  # one for each of `scheduled`

    def has_room_for_prefill(self, sequence: EngineSequence) -> bool:
        """Whether the step has room for a token of a prompt, or for all tokens if prompts are not divided."""
        if self._takes_whole_prompts:
            return self._has_room_for_all(sequence)
        return self.num_tokens_left > 0 and self._num_prompt_tokens_left(sequence) > 0

    @property
    def has_single_tokens(self) -> bool:
        """Whether the batch is not empty, each sequence has one token, and the budget has tokens left."""
        return 0 < len(self.sequences) == self._budget - self.num_tokens_left < self._budget

    @property
    def has_room_for_scores(self) -> bool:
        return self._num_scored_tokens_left > 0

    def chunk(self, sequence: EngineSequence, *, num_reserved: int = 0) -> int:
        """Return the number of prompt tokens that the step takes, leaving `num_reserved` of the budget unused."""
        if self._takes_whole_prompts:
            return sequence.num_uncomputed_tokens if self._has_room_for_all(sequence) else 0
        num_tokens = min(
            sequence.num_uncomputed_tokens,
            self._chunk_tokens,
            self.num_tokens_left - num_reserved,
            self._num_prompt_tokens_left(sequence),
        )
        return min(num_tokens, self._num_scorable(sequence)) if sequence.is_scoring else num_tokens

    def _has_room_for_all(self, sequence: EngineSequence) -> bool:
        num_left = min(self.num_tokens_left, self._num_prompt_tokens_left(sequence))
        return sequence.num_uncomputed_tokens <= num_left or not self.scheduled

    def _num_scorable(self, sequence: EngineSequence) -> int:
        """Return the number of tokens that the step may compute before it reaches `MAX_SCORED_TOKENS`."""
        start = sequence.num_computed_tokens
        end = max(start, sequence.num_scored_tokens) + self._num_scored_tokens_left
        return sequence.num_uncomputed_tokens if end >= sequence.num_prompt_tokens - 1 else end - start

    def _num_prompt_tokens_left(self, sequence: EngineSequence) -> int:
        if sequence.request.is_background:
            return min(self._num_prefill_tokens_left, self._num_background_tokens_left)
        return self._num_prefill_tokens_left

    def give_states(self, path_of: Callable[[EngineSequence, int], StatePath]) -> None:
        """Set the slots for the states of every sequence. Called for a model with recurrent layers."""
        self.scheduled = [
            structs.replace(item, states=path_of(sequence, len(item.token_ids)))
            for item, sequence in zip(self.scheduled, self.sequences, strict=True)
        ]

    def add_decoding(self, sequence: EngineSequence) -> None:
        """Add the last token of a sequence. The token's block must be allocated."""
        if sequence.has_plain_sampling:  # the common case: the same result as `_scheduled_sequence`, but faster
            request = sequence.request
            scheduled = ScheduledSequence(  # positional arguments, because keyword arguments are slower
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
                () if sequence.windows is None else sequence.windows.ids,
            )
        else:
            scheduled = self._scheduled_sequence(sequence, 1)
        if sequence.wants_logprobs:
            self._has_logprobs = True
        self.scheduled.append(scheduled)
        self.sequences.append(sequence)
        self.num_tokens_left -= 1

    def add_prefill(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Add the next tokens of a prompt. The tokens' blocks must be allocated."""
        self.scheduled.append(self._scheduled_sequence(sequence, num_tokens))
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        self._num_prefill_tokens_left -= num_tokens
        self._num_background_tokens_left -= num_tokens if sequence.request.is_background else 0

    def add_drafts(self, place: int, drafts: Sequence[int]) -> None:
        """Add drafts to the item at `place`. Every sequence must decode, and the drafts' blocks must be allocated."""
        item, sequence = self.scheduled[place], self.sequences[place]
        is_simple = sequence.has_plain_sampling and item.matcher is None
        draws = () if is_simple else expand_drafts(item, sequence, drafts, self._eos_token_ids)
        self.scheduled[place] = structs.replace(item, token_ids=(*item.token_ids, *drafts), draws=draws)
        self.num_tokens_left -= len(drafts)
        self._has_drafts = True

    def build(self, decision: SchedulingDecision, *, began_at: float, epoch: int, launched_alone: bool) -> StepBatch:
        """Return the batch for the model runner."""
        return StepBatch(
            tuple(self.scheduled),
            tuple(self.sequences),
            began_at=began_at,
            epoch=epoch,
            decision=decision,
            num_scheduled_tokens=self._budget - self.num_tokens_left,
            has_logprobs=self._has_logprobs,
            has_pooling=self._has_pooling,
            has_preempted=self.has_preempted,
            has_drafts=self._has_drafts,
            launched_alone=launched_alone,
        )

    def _scheduled_sequence(self, sequence: EngineSequence, num_tokens: int) -> ScheduledSequence:
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
            window_ids=() if sequence.windows is None else sequence.windows.ids,
        )
        if scheduled.wants_logprobs:
            self._has_logprobs = True
        if scheduled.pooling is not None:
            self._has_pooling = True
        return scheduled

    def _targets(self, sequence: EngineSequence, end: int) -> tuple[int, tuple[int, ...]]:
        """Return the position of the first target and the targets, for a step that computes tokens up to `end`."""
        first = max(sequence.num_computed_tokens, sequence.num_scored_tokens) + 1
        targets = sequence.request.prompt_token_ids[first : end + 1]
        self._num_scored_tokens_left -= len(targets)
        return first, targets


def with_history(item: ScheduledSequence, sequence: EngineSequence, eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """Complete an item that lacked history, now that the token before its draw is known.

    If the sequence ended with that token, the draw is discarded, so the item needs no bans, adjustments or matcher.
    """
    if sequence.is_finished:
        return structs.replace(item, lacks_history=False, matcher=None)
    return structs.replace(
        item,
        lacks_history=False,
        banned_token_ids=_banned(sequence, eos_token_ids),
        adjustments=sequence.current_adjustments(),
    )


def expand_drafts(
    item: ScheduledSequence, sequence: EngineSequence, drafts: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[ScheduledSequence, ...]:
    """Return an item with one token, and its extension by each draft with the penalties, bans and matcher there."""
    draws, generated = [item], list(sequence.generated_token_ids)
    for draft in drafts:
        generated.append(draft)
        draws.append(after_draft(draws[-1], generated, eos_token_ids))
    return tuple(draws)


def after_draft(item: ScheduledSequence, generated: list[int], eos_token_ids: frozenset[int]) -> ScheduledSequence:
    """Return an item extended by a draft, which is the last of the `generated` tokens."""
    draft = generated[-1]
    return structs.replace(
        item,
        token_ids=(*item.token_ids, draft),
        banned_token_ids=banned_token_ids(item.sampling, generated, eos_token_ids),
        adjustments=None if item.adjustments is None else item.adjustments.after(draft),
        matcher=None if item.matcher is None else item.matcher.after(draft),
    )


def _banned(sequence: EngineSequence, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens that may not be drawn next for a sequence. All tokens of the sequence must be known."""
    return banned_token_ids(sequence.request.sampling, sequence.generated_token_ids, eos_token_ids)


def banned_token_ids(sampling: SamplingParams, generated: list[int], eos_token_ids: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens that may not be drawn after the `generated` tokens."""
    banned = _ends_of_bad_words(sampling.bad_words, generated) if sampling.bad_words else ()
    if len(generated) < sampling.min_tokens:
        return (*banned, *eos_token_ids, *sampling.stop_token_ids)
    if sampling.ignore_eos and sampling.grammar is not None:  # does not apply once the grammar allows no other token
        return (*banned, *eos_token_ids)
    return banned


def _ends_of_bad_words(bad_words: tuple[tuple[int, ...], ...], generated: list[int]) -> tuple[int, ...]:
    """Return the tokens that would complete one of the words after the `generated` tokens."""
    last = generated[-1] if generated else None
    return tuple([word[-1] for word in bad_words if len(word) == 1 or (word[-2] == last and _ends(generated, word))])


def _ends(generated: list[int], word: tuple[int, ...]) -> bool:
    """Whether the `generated` tokens end with all tokens of the word but the last."""
    return tuple(generated[1 - len(word) :]) == word[:-1]


def _pooling(sequence: EngineSequence, end: int) -> Pooling | None:
    """Return the hidden states that the embedding needs from a step that computes tokens up to `end`."""
    pooling = sequence.request.pooling
    return None if pooling == Pooling.LAST and end < sequence.num_prompt_tokens else pooling


# ---------------------------------------------------------------------- drafts


def kept_tokens(batch: StepBatch, result: StepResult) -> StepResult:
    """Return the result of a batch with drafts, without the draws after a draft that differs from the drawn token.

    A draw is a function of the request, the position and the previous tokens. The kept tokens are therefore the tokens
    that steps without drafts would have drawn, both with greedy decoding and with sampling. (Leviathan et al., 2023,
    accept by a ratio of probabilities instead, because their draws are random.)
    """
    token_ids: list[int] = []
    num_kept: list[int] = []
    logprobs = dict(result.logprobs)
    start = 0
    for item, sequence in zip(batch.scheduled, batch.sequences, strict=True):
        draws = result.token_ids[start : start + len(item.token_ids)]
        number = _num_kept(draws, item, sequence.end_token_ids)
        if item.request_id in logprobs:
            logprobs[item.request_id] = logprobs[item.request_id][:number]
        token_ids += draws[:number]
        num_kept.append(number)
        start += len(draws)
    return result._replace(token_ids=token_ids, logprobs=logprobs, num_kept=num_kept)


def _num_kept(draws: Sequence[int], item: ScheduledSequence, end_token_ids: Collection[int]) -> int:
    """Return the number of kept draws: the first, and each later one if the draft before it was drawn and is no end.

    A later draw is not kept if its matcher has failed. If it fails again as the first of a step, its request ends.
    """
    number = 1
    for drawn, draft in zip(draws, item.token_ids[1:], strict=False):
        matcher = item.draws[number].matcher if item.draws else None
        if drawn != draft or drawn in end_token_ids or (matcher is not None and matcher.failure is not None):
            break
        number += 1
    return number
