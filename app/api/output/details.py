"""The details that a call wants of its tokens, as its endpoint writes them: in chunks, and in whole choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.api.call import Call
from app.api.output.token_details import Details, TokenNames, ToldToken, prompt_logprobs_entries

Json = dict[str, Any]
WriteLogprobs = Callable[[list[ToldToken], TokenNames, int], Json]  # with so many of the likeliest tokens


@dataclass(slots=True)
class KeptDetails:
    """Of one choice, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    sum_logprobs: float = 0.0
    logprobs: Json | None = None  # as the endpoint has them
    prompt_logprobs: list[Json | None] = field(default_factory=lambda: [None])  # nothing predicts a prompt's first

    @property
    def mean_logprob(self) -> float:
        """How likely the model found what it generated, per token."""
        return self.sum_logprobs / len(self.token_ids) if self.token_ids else 0.0


class DetailWriter:
    """Writes the details of one call's choices."""

    def __init__(self, call: Call, write_logprobs: WriteLogprobs) -> None:
        self._call = call
        self._wishes = call.wishes
        self._write_logprobs = write_logprobs
        self._names = TokenNames(call.model.tokenizer, are_ids=call.wishes.names_are_ids)
        self._kept = [KeptDetails() for _ in call.requests]

    def keep(self, index: int, details: Details) -> None:
        """Note what a piece tells of the tokens of one of the call's requests."""
        # Written as they come: all at once, a long prompt's would hold up the streams of others.
        kept = self._kept[index]
        kept.token_ids += details.token_ids
        kept.sum_logprobs += sum([each.logprob for each in details.logprobs])
        new = self._logprobs(details)
        if kept.logprobs is None:
            kept.logprobs = new
        elif new is not None:
            for name, values in new.items():
                if values:
                    kept.logprobs[name] += values
        if self._wishes.prompt_logprobs is not None and details.prompt_logprobs:
            first = len(kept.prompt_logprobs)
            token_ids = self._call.requests[index].prompt_token_ids[first : first + len(details.prompt_logprobs)]
            kept.prompt_logprobs += prompt_logprobs_entries(
                token_ids, details.prompt_logprobs, self._names, num_top=self._wishes.prompt_logprobs
            )

    def mean_logprob(self, index: int) -> float:
        """Of the tokens that one of the requests has got."""
        return self._kept[index].mean_logprob

    def of_choice(self, index: int) -> Json:
        """What a finished choice says of one of the requests."""
        kept, fields = self._kept[index], Json()
        if self._wishes.logprobs is not None:
            fields["logprobs"] = kept.logprobs
        if self._wishes.token_ids:
            fields["token_ids"] = kept.token_ids
        return fields

    def of_chunk(self, details: Details | None) -> Json:
        """What the choice of a chunk says of the tokens of a piece."""
        fields = Json()
        if details is None:
            return fields
        if details.told:
            fields["logprobs"] = self._logprobs(details)
        if self._wishes.token_ids:
            fields["token_ids"] = list(details.token_ids)
        return fields

    def of_prompt(self, index: int) -> Json:
        """What an answer says of the prompt of one of the requests."""
        fields = Json()
        if self._wishes.token_ids:
            fields["prompt_token_ids"] = list(self._call.requests[index].prompt_token_ids)
        if self._wishes.prompt_logprobs is not None:
            first_sample = index - index % self._call.num_samples  # the only one that has them
            fields["prompt_logprobs"] = self._kept[first_sample].prompt_logprobs
        return fields

    def _logprobs(self, details: Details) -> Json | None:
        num_top = self._wishes.logprobs
        return None if num_top is None else self._write_logprobs(details.told, self._names, num_top)
