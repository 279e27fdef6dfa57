"""What an ingress knows of a request under way: every token it has received, so that another replica can go on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from app.engine.request import Request, TokenDelta
from app.errors import DeadlineMissed


class Journal:
    """The tokens of one request, in whatever many pieces and from whatever many replicas they came.

    With randomness a function of seed and position (see `app/model/sampler.py`) these tokens are all the state there
    is: a replica that gets the prompt and the journal continues exactly as the one before would have.
    """

    def __init__(self, request: Request, *, began_at: float) -> None:
        self._request = request
        self._began_at = began_at
        self._token_ids = list(request.generated_token_ids)
        self._num_scored_tokens = request.num_scored_tokens
        self._num_sent = self._num_known  # what the last replica was given with it
        self._num_cached_tokens: int | None = None  # as the first replica found it: usage does not change later
        self.num_attempts = 0
        self.lost_on: list[str] = []  # the replicas that were lost while they had it
        self.fruitless_on: list[str] = []  # the last of them in a row that were sound before and gave it no token
        self.lost_at: float | None = None  # when its last replica was lost, by the clock of `began_at`

    @property
    def request(self) -> Request:
        """The request as it came."""
        return self._request

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_progressed(self) -> bool:
        """Whether the replica that has it now, or had it last, has given it a token or a prompt token's score."""
        return self._num_known > self._num_sent

    def note_loss(self, replica_id: str, now: float, *, was_sound: bool) -> None:
        """The replica is lost that had it last; `was_sound`: nothing was known to be wrong with that one before."""
        self.lost_at = now
        self.lost_on.append(replica_id)
        if self.has_progressed:
            self.fruitless_on.clear()
        elif was_sound:
            self.fruitless_on.append(replica_id)

    def forgive(self, explained: Collection[str]) -> None:
        """The loss of these replicas is not held against it: another request is known to have killed them."""
        self.lost_on = [each for each in self.lost_on if each not in explained]
        self.fruitless_on = [each for each in self.fruitless_on if each not in explained]

    def num_scored_tokens(self) -> int:
        """Prompt tokens whose log-probabilities have come."""
        return self._num_scored_tokens

    @property
    def _num_known(self) -> int:
        return self.num_tokens + self._num_scored_tokens

    def next_request(self, now: float) -> Request:
        """The request as the next replica gets it: with an id of its own, the tokens so far and the time that is left.

        Raises DeadlineMissed when no time is left.
        """
        deadline_s = self._request.deadline_s
        if deadline_s is not None and self.num_attempts:
            deadline_s -= now - self._began_at
            if deadline_s <= 0:
                raise DeadlineMissed(
                    f"the deadline of {self._request.deadline_s:g} s has passed with {self.num_tokens:,} tokens "
                    f"generated; they were lost with a replica or waited for one"
                )
        # The first keeps the id; later ones differ in it, so that late words of an earlier one are known as such.
        number = f".{self.num_attempts}" if self.num_attempts else ""
        self.num_attempts += 1
        self._num_sent = self._num_known
        return replace(
            self._request,
            request_id=f"{self._request.request_id}{number}",
            generated_token_ids=tuple(self._token_ids),
            num_scored_tokens=self._num_scored_tokens,
            deadline_s=deadline_s,
        )

    def book(self, delta: TokenDelta) -> TokenDelta:
        """Note a delta's tokens; returns it as the caller should see it, whichever attempt it came from."""
        self._token_ids.extend(delta.token_ids)
        self._num_scored_tokens += len(delta.prompt_logprobs)
        if delta.token_ids and self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.request_id == self._request.request_id and delta.num_cached_tokens == (self._num_cached_tokens or 0):
            return delta
        return delta._replace(request_id=self._request.request_id, num_cached_tokens=self._num_cached_tokens or 0)
