"""Tokens that stand for those which a log without prompts does not tell: equal blocks where the hashes are equal."""

from __future__ import annotations

from collections.abc import Iterable

from app.engine.request import Request
from app.engine.trace.entries import Entry, OutputHashes, RedactedArrival, sampling_of

_FIRST = 1 << 32  # above the token ids of every model


class StandIns:
    """The tokens of all requests of one log, made of the hashes of their blocks."""

    def __init__(self, entries: Iterable[Entry], *, block_size: int) -> None:
        """Looks at all entries: what a request generated is told when it ends."""
        self._block_size = block_size
        self._hashes: dict[int, list[str]] = {}  # by number, one for each full block that is known
        self._tokens: dict[tuple[str | int, int], int] = {}  # by place in a hashed block, or in a request
        for entry in entries:
            if isinstance(entry, RedactedArrival):
                self._hashes[entry.number] = list(entry.request["block_hashes"])
            elif isinstance(entry, OutputHashes):
                self._hashes.setdefault(entry.number, []).extend(entry.block_hashes)

    def token(self, number: int, position: int) -> int:
        """What stands at a position of a request, prompt and output in a row."""
        block, offset = divmod(position, self._block_size)
        hashes = self._hashes.get(number, [])
        place = (hashes[block], offset) if block < len(hashes) else (number, position)
        return self._tokens.setdefault(place, _FIRST + len(self._tokens))

    def request(self, arrival: RedactedArrival) -> Request:
        """A request as long as the one that arrived."""
        given = dict(arrival.request)
        num_prompt, num_generated = given.pop("num_prompt_tokens"), given.pop("num_generated_tokens", 0)
        del given["block_hashes"]
        tokens = tuple(self.token(arrival.number, position) for position in range(num_prompt + num_generated))
        given["sampling"] = sampling_of(given["sampling"])
        return Request(prompt_token_ids=tokens[:num_prompt], generated_token_ids=tokens[num_prompt:], **given)
