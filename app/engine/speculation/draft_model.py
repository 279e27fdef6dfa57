"""Drafts with a smaller model, which computes the same sequences in its own KV memory, with the same block ids.

Speculative decoding with a draft model follows Leviathan et al., 2023, and Chen et al., 2023. Here, the draft model
draws with the request's seed, position, filters, penalties and matcher. Because the noise of a draw depends only on the
seed and the position, the draws of both models are equal more often than independent draws would be (Gumbel coupling:
Daliri, Musco and Suresh, 2024). Does not use torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from app.engine.batch import ScheduledSequence, StepBatch, StepResult, after_draft
from app.engine.isolation import run_or_error
from app.engine.model_runner import ModelRunner
from app.engine.request import ModelInfo
from app.engine.sequence import EngineSequence
from app.engine.speculation.draft_pace import DraftPace
from app.engine.speculation.drafter import Drafter, Take
from app.engine.speculation.prompt_lookup import FIRST_ACCEPTANCE, num_worthwhile, updated
from app.errors import described

logger = logging.getLogger(__name__)

# Maximum tokens per step for sequences that the draft model has not followed. The fewest missing tokens come first.
MAX_CATCH_UP_TOKENS = 256
_NUM_BEHIND = 2  # maximum number of missing tokens in a sequence that the draft model followed in the previous step
_NEWEST_SHARE = 1 / 32  # weight of a new draft in the acceptance average


@dataclass(slots=True)
class _Drafting:
    """A sequence for which the draft model computes drafts or missing tokens."""

    place: int  # index of the sequence in the step
    sequence: EngineSequence
    item: ScheduledSequence  # the tokens to compute next
    number: int  # number of drafts; 0 if the draft model only catches up
    drafts: list[int] = field(default_factory=list)

    def go_on(self, draft: int, eos_token_ids: frozenset[int]) -> None:
        """Append a drawn draft. If more drafts are needed, advance the item to the token after it."""
        self.drafts.append(draft)
        if len(self.drafts) < self.number:
            generated = [*self.sequence.generated_token_ids, *self.drafts]
            behind = after_draft(self.item, generated, eos_token_ids)
            self.item = structs.replace(behind, token_ids=(draft,), start=self.item.end)


class ModelDrafter(Drafter):
    """Drafts as many tokens per sequence as recent acceptance and step times justify, up to `max_drafts`."""

    def __init__(self, runner: ModelRunner, *, max_model_len: int, model_info: ModelInfo, max_drafts: int = 8) -> None:
        """runner: runs the draft model. It must have as many KV blocks as the main model, which `model_info` describes.

        max_model_len: the draft model's maximum length. Longer sequences get no drafts.
        """
        self._runner = runner
        self._max_drafts = max_drafts
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(model_info.eos_token_ids)
        self._pace = DraftPace(by_model=True)
        self._acceptance = FIRST_ACCEPTANCE
        # Number of tokens with KV in the draft model's memory, by sequence and epoch (which determines the block ids).
        self._num_computed: dict[tuple[EngineSequence, int], int] = {}
        self._number = 0  # number of drafts per sequence in the current step
        self._has_computed = False  # whether the draft model ran in the current step
        self._has_failed = False

    def begin(self, num_sequences: int) -> bool:
        self._has_computed = False
        if self._has_failed:
            return False
        min_acceptance = self._pace.min_acceptance(num_sequences, chance=self._acceptance)
        self._number = min(self._max_drafts, num_worthwhile(self._acceptance, min_acceptance))
        return self._number > 0

    def draft(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> Iterator[tuple[int, Sequence[int]]]:
        step = self._first_step(items, sequences, take)
        drafting = [each for each in step if each.number]
        while step:
            self._has_computed = True
            batch = StepBatch(tuple([each.item for each in step]), tuple([each.sequence for each in step]))
            result = run_or_error(self._runner.run, batch)
            if isinstance(result, Exception):
                self._has_failed = True
                logger.error("the draft model failed; serving continues without drafts: %s", described(result))
                return
            for each in step:
                self._num_computed[each.sequence, each.sequence.epoch] = each.item.end
            for each, draft in zip([each for each in step if each.number], result.token_ids, strict=True):
                each.go_on(draft, self._eos_token_ids)
            step = [each for each in drafting if len(each.drafts) < each.number]
        for each in drafting:
            yield each.place, each.drafts

    def _first_step(
        self, items: Sequence[ScheduledSequence], sequences: Sequence[EngineSequence], take: Take
    ) -> list[_Drafting]:
        """Return items for the tokens that the draft model has not computed. Complete sequences also get drafts."""
        found: list[_Drafting] = []
        num_left = MAX_CATCH_UP_TOKENS
        # After a failed step, the memory may contain drafts beyond the sequence's tokens. They are overwritten.
        lacking = [max(1, each.num_tokens - self._num_computed.get((each, each.epoch), 0)) for each in sequences]
        for place in sorted(range(len(sequences)), key=lacking.__getitem__):
            sequence, num_lacking = sequences[place], lacking[place]
            num_fitting = self._max_model_len - sequence.num_tokens + 1
            num_tokens = num_lacking if num_lacking <= _NUM_BEHIND else min(num_lacking, num_left)
            if num_fitting < 1 or not num_tokens or not _is_worth_catching_up(sequence, num_lacking):
                continue
            number = take(sequence, min(self._number, num_fitting)) if num_tokens == num_lacking else 0
            if num_tokens == num_lacking and not number:
                continue
            if num_lacking > _NUM_BEHIND:
                num_left -= num_tokens
            item, start = items[place], sequence.num_tokens - num_lacking
            first = structs.replace(
                item,
                token_ids=sequence.token_ids(start, start + num_tokens),
                start=start,
                samples=number > 0,
                matcher=item.matcher if number else None,
                adapter=None,
            )
            found.append(_Drafting(place, sequence, first, number))
        return found

    def stepped(self, batch: StepBatch, result: StepResult, *, seconds: float) -> None:
        # A step in which the draft model only caught up counts neither as drafted nor as plain.
        if batch.has_drafts or not self._has_computed:
            self._pace.stepped(batch, result, seconds)
        self._num_computed = {  # rejected drafts are invalid, and the last token has no KV yet
            key: min(self._num_computed[key], key[0].num_tokens - 1)
            for key in [(each, each.epoch) for each in batch.sequences]
            if key in self._num_computed
        }
        if batch.has_drafts:
            for item, num_kept in zip(batch.scheduled, result.num_kept, strict=True):
                num_drafts = len(item.token_ids) - 1
                if num_drafts:
                    self._acceptance = updated(self._acceptance, num_drafts, num_kept - 1, _NEWEST_SHARE)

    def sleep(self) -> None:
        self._runner.sleep()

    def wake(self) -> None:
        self._runner.wake()


def _is_worth_catching_up(sequence: EngineSequence, num_lacking: int) -> bool:
    num_expected = max(1, sequence.num_predicted_tokens - sequence.num_generated_tokens)
    max_catch_up_share = 8  # catching up with more tokens than this, per expected output token, is not worthwhile
    return num_lacking <= _NUM_BEHIND + max_catch_up_share * num_expected
