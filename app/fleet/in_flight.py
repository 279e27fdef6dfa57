"""A request that an ingress has not finished: its tokens so far, and the attempt that serves it now."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from msgspec import structs

from app.engine.request import PrefixSource, Request, TokenDelta, TokenLogprobs, UnreadDelta, as_delta, with_next
from app.errors import Cancelled, CarouselError, DeadlineMissed, DeviceFault, EngineStopped
from app.fleet.dispatch import Decision


class ReplicaLost(Exception):
    """The replica of a request will send no more of it; another replica can go on."""

    def __init__(self, message: str, *, reason: str, avoid: Collection[str] = frozenset()) -> None:
        """`reason` is one word for metrics; the message is for the log. `avoid`: other replicas that cannot go on."""
        super().__init__(message)
        self.reason = reason
        self.avoid = avoid


class RequestLeft(ReplicaLost):
    """A request goes on elsewhere though nothing has failed."""


class Turns:
    """Makes calls in the order in which they come, a few in each turn of the event loop: all else goes on meanwhile."""

    def __init__(self, *, at_once: int = 16) -> None:
        """`at_once`: calls in one turn."""
        self._at_once = at_once
        self._calls: deque[Callable[[], object]] = deque()
        self._next: asyncio.Handle | None = None

    def add(self, call: Callable[[], object]) -> None:
        """Make a call when its turn has come."""
        self._calls.append(call)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        try:
            for _ in range(min(self._at_once, len(self._calls))):
                self._calls.popleft()()
        finally:
            self._next = asyncio.get_running_loop().call_soon(self._take) if self._calls else None


class InFlightRequest:
    """One request of an ingress, served by one attempt after another. Belongs to one event loop, has one reader.

    Every token that the reader gets is kept. Randomness is a function of seed and position (see
    `app/model/sampler.py`), so these tokens are all the state there is: a replica that gets the prompt and the tokens
    goes on exactly as the replica before would have.

    Each attempt has an id of its own. What arrives for an earlier attempt is not for this one.

    While the reader waits for tokens, `take` gets them in its place, at once. So no task wakes up for each token.
    """

    __slots__ = (
        "__weakref__", "_began_at", "_error", "_is_in_text", "_num_cached_tokens", "_num_left", "_num_scored_tokens",
        "_num_sent", "_num_unscored", "_token_ids", "_turns", "_unread", "_waiting", "decision", "has_ended",
        "is_accepted", "is_done", "leaves_after_prompt", "left", "lost_at", "num_attempts", "num_times_short",
        "prefixes_at", "replica_id", "request", "sent", "take", "weights",
    )  # fmt: skip

    def __init__(self, request: Request, *, began_at: float, turns: Turns) -> None:
        """`turns` wake the readers of requests that have lost their replicas: these may be thousands at once."""
        self._turns = turns
        self.request = request  # as its caller sent it
        # Takes the next delta in the middle of the text for the reader, or says that the reader must.
        self.take: Callable[[TokenDelta], bool] | None = None
        self.num_attempts = 0
        self.num_times_short = 0  # it left a replica that was short of memory
        self.weights = 0  # the digest of those that its tokens are of; 0 while not known
        self.lost_at: float | None = None  # when its last replica was lost or left, by the clock of `began_at`
        self.left: PrefixSource | None = None  # that replica, where it has its KV memory
        self._began_at = began_at
        self._token_ids = list(request.generated_token_ids)
        self._num_scored_tokens = request.num_scored_tokens
        self._num_sent = 0  # tokens and scores that the current replica was given
        self._num_cached_tokens: int | None = None  # as the first replica found it: usage does not change later

    @property
    def num_tokens(self) -> int:
        """Generated so far, by all attempts."""
        return len(self._token_ids)

    @property
    def needs_weights(self) -> int:
        """The digest of the only weights with which it can go on; 0 while it has no tokens, and any will do."""
        return self.weights if self._token_ids or self._num_scored_tokens else 0

    @property
    def has_progressed(self) -> bool:
        """Whether the current attempt, or the last one, has brought a token or a prompt token's score."""
        return len(self._token_ids) + self._num_scored_tokens > self._num_sent

    # ------------------------------------------------------------------ attempts

    def seconds_left(self, now: float) -> float | None:
        """Of a later attempt, where the request has a deadline. Raises DeadlineMissed when it has passed."""
        deadline_s = self.request.deadline_s
        if deadline_s is not None:
            deadline_s -= now - self._began_at
            if deadline_s <= 0:
                raise DeadlineMissed(
                    f"the deadline of {self.request.deadline_s:g} s has passed with {self.num_tokens:,} tokens "
                    f"generated; they were lost with a replica or waited for one"
                )
        return deadline_s

    def begin_attempt(self, now: float) -> Request:
        """The request as the next replica gets it: with an id of its own, the tokens so far and the time that is left.

        Raises DeadlineMissed when no time is left.
        """
        sent = self.request  # the first attempt keeps its id
        if self.num_attempts:
            sent = replace(
                self.request,
                request_id=f"{self.request.request_id}.{self.num_attempts}",
                generated_token_ids=tuple(self._token_ids),
                num_scored_tokens=self._num_scored_tokens,
                deadline_s=self.seconds_left(now),
                no_queue=self.request.no_queue and self.lost_at is None,  # what has begun is not refused
            )
        self.num_attempts += 1
        sampling = self.request.sampling
        self._num_left = sampling.max_tokens - len(self._token_ids)
        num_scores = 0 if sampling.prompt_logprobs is None else len(self.request.prompt_token_ids) - 1
        self._num_unscored = num_scores - self._num_scored_tokens
        self._num_sent = len(self._token_ids) + self._num_scored_tokens
        self.sent = sent  # the request as this attempt has it
        self.decision: Decision | None = None  # from `place` on
        self.replica_id = ""  # likewise
        self.prefixes_at: tuple[str, int, str] | None = None  # where the replica gives its KV memory away
        self.leaves_after_prompt = False  # another replica goes on after its first token
        self.is_accepted = False  # the replica has queued it
        self.has_ended = False  # the attempt takes nothing more
        self.is_done = False  # it ended by a stop or its limit, and its reader has seen that
        self._is_in_text = False  # the reader has had a token of this attempt
        self._unread: UnreadDelta | None = None  # that its reader has not taken
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None  # the reader's, while it waits
        return sent

    def place(self, decision: Decision, *, weights: int = 0, prefixes_at: tuple[str, int, str] | None = None) -> None:
        """The current attempt is sent to a replica, which may still refuse it."""
        self.decision = decision
        self.replica_id = decision.candidates[0].replica_id
        self.weights = weights
        self.prefixes_at, self.left = prefixes_at, None

    @property
    def is_trusted(self) -> bool:
        """Whether nothing was known to be wrong with the replica when the request was placed there."""
        return self.decision is not None and not self.decision.candidates[0].is_suspect

    # ------------------------------------------------------------------ what arrives

    def put(self, delta: TokenDelta) -> None:
        """Take a delta of the current attempt; after its end nothing counts.

        Raises ReplicaLost when the replica sends more than the request asks for.
        """
        if self.has_ended:
            return
        self._num_left -= len(delta.token_ids)
        if self._num_left < 0:
            raise ReplicaLost("it sent more tokens than a request asks for", reason="broken")
        if delta.logprobs or delta.prompt_logprobs:
            self._check_logprobs(delta)
        if self._is_in_text and self.take is not None and self._is_taken(delta, self.take):
            return
        self.is_accepted = self.is_accepted or delta.error is None
        self.has_ended = delta.finish_reason is not None
        if delta.error is not None:
            delta = self._take_error(delta, delta.error)
        if self._error is None or delta.token_ids:
            # A client may not read for long, and a delta for each token would take fifty times the token's number.
            self._unread = with_next(self._unread, delta)
        self._wake()

    def _check_logprobs(self, delta: TokenDelta) -> None:
        sampling = self.request.sampling
        self._num_unscored -= len(delta.prompt_logprobs)
        num_top = len(sampling.logprob_token_ids) or sampling.logprobs or 0
        if (
            self._num_unscored < 0
            or len(delta.logprobs) > len(delta.token_ids)
            or _most_top(delta.logprobs) > num_top
            or _most_top(delta.prompt_logprobs) > (sampling.prompt_logprobs or 0)
        ):
            raise ReplicaLost("it sent more log-probabilities than a request asks for", reason="broken")

    def _is_taken(self, delta: TokenDelta, take: Callable[[TokenDelta], bool]) -> bool:
        """Whether the delta has gone past the reader, which waits on."""
        if delta.finish_reason is not None or self._waiting is None or self._waiting.done():
            return False
        seen = self._seen(delta)
        try:
            if not take(seen):
                return False
        except Exception as error:  # it is this request's alone, not the replica's or other requests'
            self.fail(error)
            return True
        self._keep(seen)
        return True

    def _take_error(self, delta: TokenDelta, error: CarouselError) -> TokenDelta:
        # An engine that stops, or a device that fails on every request, says nothing about this request.
        is_its_own = not isinstance(error, EngineStopped | DeviceFault)
        self._error = error if is_its_own else ReplicaLost(str(error), reason="engine_failed")
        return structs.replace(delta, finish_reason=None, error=None)

    def fail(self, error: Exception) -> None:
        """End the current attempt without its replica.

        Cancelled takes the place of a ReplicaLost that the reader has not seen: the request does not go on.
        """
        is_called_off = isinstance(error, Cancelled) and isinstance(self._error, ReplicaLost)
        if not self.has_ended or is_called_off:
            self.has_ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        """There is something for the reader."""
        if self._waiting is None or self._waiting.done():
            return
        if isinstance(self._error, ReplicaLost):
            self._turns.add(self._wake_now)
        else:
            self._waiting.set_result(None)

    def _wake_now(self) -> None:
        # The reader may have come by itself meanwhile, and wait for the next attempt.
        has_something = self._unread is not None or self._error is not None
        if has_something and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self) -> TokenDelta:
        """Everything that has accumulated, as one delta of the caller's request; an error comes after the tokens.

        Raises:
            ReplicaLost: the replica is gone.
            CarouselError: the replica refused the request, or the request ended with an error.
        """
        if self._unread is None and self._error is None:
            # Not an Event: this is waited for at every token, and a bare future costs half.
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._unread is not None:
            unread, self._unread = self._unread, None
            delta = self._seen(as_delta(unread))
            self._keep(delta)
            return delta
        error, self._error = self._error, None
        assert error is not None, "the reader is woken by a delta or an error"
        try:
            raise error.with_traceback(None)  # all requests of a lost replica have the same
        finally:
            del error  # its traceback has this frame, and the two would keep each other

    def _keep(self, delta: TokenDelta) -> None:
        self._token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs:
            self._num_scored_tokens += len(delta.prompt_logprobs)
        if delta.token_ids and not self._is_in_text:
            self._is_in_text = True
            if self._num_cached_tokens is None:
                self._num_cached_tokens = delta.num_cached_tokens

    def _seen(self, delta: TokenDelta) -> TokenDelta:
        """A delta as the caller should see it, whichever attempt it came from."""
        num_cached_tokens = self._num_cached_tokens
        if num_cached_tokens is None:
            num_cached_tokens = delta.num_cached_tokens if delta.token_ids else 0
        if self.num_attempts == 1 and delta.num_cached_tokens == num_cached_tokens:
            return delta
        return structs.replace(delta, request_id=self.request.request_id, num_cached_tokens=num_cached_tokens)


def _most_top(logprobs: Collection[TokenLogprobs]) -> int:
    """The largest number of other tokens at one of these positions."""
    return max((max(len(each.top_token_ids), len(each.top_logprobs)) for each in logprobs), default=0)
