"""An ingress's unfinished request: its tokens so far, and the current attempt to serve it."""

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
    """Raised when a request's replica will send no more deltas. Another replica can resume the request."""

    def __init__(self, message: str, *, reason: str, avoid: Collection[str] = frozenset()) -> None:
        """`message` is logged; `reason` is one word for the metrics. `avoid` lists replicas that must not resume it."""
        super().__init__(message)
        self.reason = reason
        self.avoid = avoid


class RequestMoved(ReplicaLost):
    """Raised when a request is moved to another replica although nothing has failed."""


class Turns:
    """Runs calls in order, a few per turn of the event loop, so that other work can run in between."""

    def __init__(self, *, at_once: int = 16) -> None:
        """`at_once` is the maximum number of calls per turn."""
        self._at_once = at_once
        self._calls: deque[Callable[[], object]] = deque()
        self._next: asyncio.Handle | None = None

    def add(self, call: Callable[[], object]) -> None:
        """Schedule a call after all calls that were added before it."""
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
    """One request of an ingress, served by one or more attempts. It belongs to one event loop and has one reader.

    The request stores every token that its reader receives. Randomness is a function of seed and position (see
    `app/model/sampler.py`), so these tokens are the complete state: a replica that receives them with the prompt
    continues exactly as the previous replica would have.

    Each attempt uses its own id, so that deltas from earlier attempts are recognized and ignored.

    While the reader is waiting, `take` receives the tokens directly, which avoids waking a task for each token.
    """

    __slots__ = (
        "__weakref__", "_began_at", "_error", "_num_cached_tokens", "_num_left", "_num_scored_tokens", "_num_sent",
        "_num_unscored", "_token_ids", "_turns", "_unread", "_waiting", "decision", "has_ended", "has_first_token",
        "is_accepted", "is_done", "leaves_after_prompt", "left", "lost_at", "num_attempts", "num_times_short",
        "prefixes_at", "replica_id", "request", "sent", "take", "weights",
    )  # fmt: skip

    def __init__(self, request: Request, *, began_at: float, turns: Turns) -> None:
        """`turns` wakes the readers whose requests have lost their replicas, because thousands may wake at once."""
        self._turns = turns
        self.request = request  # as its caller sent it
        self.take: Callable[[TokenDelta], bool] | None = None  # see `TokenStream.deliver_to`
        self.num_attempts = 0
        self.num_times_short = 0  # how often the request left a replica that was short of memory
        self.weights = 0  # digest of the weights that generated its tokens; 0 while unknown
        self.lost_at: float | None = None  # when it last lost or left a replica, by the clock of `began_at`
        self.left: PrefixSource | None = None  # the replica that the request left, if its KV memory can be fetched
        self._began_at = began_at
        self._token_ids = list(request.generated_token_ids)
        self._num_scored_tokens = request.num_scored_tokens
        self._num_sent = 0  # tokens and scores that the current attempt started with
        self._num_cached_tokens: int | None = None  # the first replica's, because the reported usage must not change

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far, by all attempts."""
        return len(self._token_ids)

    @property
    def needs_weights(self) -> int:
        """Digest of the weights that must resume the request, or 0 if any can because it has no tokens yet."""
        return self.weights if self._token_ids or self._num_scored_tokens else 0

    @property
    def has_progressed(self) -> bool:
        """Whether the current or last attempt has produced a token or a prompt token's score."""
        return len(self._token_ids) + self._num_scored_tokens > self._num_sent

    # ------------------------------------------------------------------ attempts

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the deadline, or None if there is none. Raises DeadlineMissed if it has passed."""
        deadline_s = self.request.deadline_s
        if deadline_s is not None:
            deadline_s -= now - self._began_at
            if deadline_s <= 0:
                raise DeadlineMissed(
                    f"the deadline of {self.request.deadline_s:g} s passed after {self.num_tokens:,} generated tokens, "
                    f"before the request was sent to a replica again"
                )
        return deadline_s

    def begin_attempt(self, now: float) -> Request:
        """Return the request for the next replica, with a new id, the tokens so far and the remaining time.

        Raises DeadlineMissed if no time is left.
        """
        sent = self.request  # the first attempt uses the request's own id
        if self.num_attempts:
            sent = replace(
                self.request,
                request_id=f"{self.request.request_id}.{self.num_attempts}",
                generated_token_ids=tuple(self._token_ids),
                num_scored_tokens=self._num_scored_tokens,
                deadline_s=self.seconds_left(now),
                no_queue=self.request.no_queue and self.lost_at is None,  # only the first attempt may be refused
            )
        self.num_attempts += 1
        sampling = self.request.sampling
        self._num_left = sampling.max_tokens - len(self._token_ids)
        num_scores = 0 if sampling.prompt_logprobs is None else len(self.request.prompt_token_ids) - 1
        self._num_unscored = num_scores - self._num_scored_tokens
        self._num_sent = len(self._token_ids) + self._num_scored_tokens
        self.sent = sent  # the request as this attempt sends it
        self.decision: Decision | None = None  # set by `place`
        self.replica_id = ""  # set by `place`
        self.prefixes_at: tuple[str, int, str] | None = None  # where other replicas may fetch its KV memory
        self.leaves_after_prompt = False  # whether another replica continues after the first token
        self.is_accepted = False  # whether the replica has queued the request
        self.has_ended = False  # whether the attempt ignores further deltas
        self.is_done = False  # whether the reader has received the finish reason
        self.has_first_token = False  # whether the reader has received a token from this attempt
        self._unread: UnreadDelta | None = None  # merged deltas that the reader has not received yet
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None  # the reader waits for this future
        return sent

    def place(self, decision: Decision, *, weights: int = 0, prefixes_at: tuple[str, int, str] | None = None) -> None:
        """Record the current attempt's replica. The replica may still refuse the request."""
        self.decision = decision
        self.replica_id = decision.candidates[0].replica_id
        self.weights = weights
        self.prefixes_at, self.left = prefixes_at, None

    @property
    def is_trusted(self) -> bool:
        """Whether the replica was not suspect when the request was placed on it."""
        return self.decision is not None and not self.decision.candidates[0].is_suspect

    # ------------------------------------------------------------------ what arrives

    def put(self, delta: TokenDelta) -> None:
        """Accept a delta of the current attempt. Deltas after the end of the attempt are ignored.

        Raises ReplicaLost if the replica sends more tokens or log-probabilities than requested.
        """
        if self.has_ended:
            return
        self._num_left -= len(delta.token_ids)
        if self._num_left < 0:
            raise ReplicaLost("it sent more tokens than requested", reason="broken")
        if delta.logprobs or delta.prompt_logprobs:
            self._check_logprobs(delta)
        if self.has_first_token and self.take is not None and self._is_taken(delta, self.take):
            return
        self.is_accepted = self.is_accepted or delta.error is None
        self.has_ended = delta.finish_reason is not None
        if delta.error is not None:
            delta = self._take_error(delta, delta.error)
        if self._error is None or delta.token_ids:
            # Deltas are merged because a client may pause for long: a delta uses 50 times the memory of a token id.
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
            raise ReplicaLost("it sent more log-probabilities than requested", reason="broken")

    def _is_taken(self, delta: TokenDelta, take: Callable[[TokenDelta], bool]) -> bool:
        """Offer a delta to `take`. Returns False if the reader must receive the delta."""
        if delta.finish_reason is not None or self._waiting is None or self._waiting.done():
            return False
        seen = self._seen(delta)
        try:
            if not take(seen):
                return False
        except Exception as error:  # must not affect the replica's stream or other requests
            self.fail(error)
            return True
        self._keep(seen)
        return True

    def _take_error(self, delta: TokenDelta, error: CarouselError) -> TokenDelta:
        # A stopped engine or failed device affects all requests, and this request can resume on another replica.
        is_its_own = not isinstance(error, EngineStopped | DeviceFault)
        self._error = error if is_its_own else ReplicaLost(str(error), reason="engine_failed")
        return structs.replace(delta, finish_reason=None, error=None)

    def fail(self, error: Exception) -> None:
        """End the current attempt with an error that does not come from the replica.

        Cancelled replaces a ReplicaLost that the reader has not received yet, so that the request is not resumed.
        """
        is_called_off = isinstance(error, Cancelled) and isinstance(self._error, ReplicaLost)
        if not self.has_ended or is_called_off:
            self.has_ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        """Wake the reader. If its replica is lost, `Turns` wakes it, to spread out the many readers of that replica."""
        if self._waiting is None or self._waiting.done():
            return
        if isinstance(self._error, ReplicaLost):
            self._turns.add(self._wake_now)
        else:
            self._waiting.set_result(None)

    def _wake_now(self) -> None:
        # The reader may have received the error in the meantime and may already be waiting for the next attempt.
        has_something = self._unread is not None or self._error is not None
        if has_something and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self) -> TokenDelta:
        """Wait for a delta or an error, and return all accumulated deltas as one. Errors are raised after the tokens.

        Raises:
            ReplicaLost: the replica is lost, or the request is moved to another replica.
            CarouselError: the replica refused the request, or the request ended with an error.
        """
        if self._unread is None and self._error is None:
            # A bare future takes half as long as an Event, and the reader may wait here for every token.
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
            raise error.with_traceback(None)  # all requests of a lost replica share one error object
        finally:
            del error  # breaks the reference cycle between this frame and the error's traceback

    def _keep(self, delta: TokenDelta) -> None:
        self._token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs:
            self._num_scored_tokens += len(delta.prompt_logprobs)
        if delta.token_ids and not self.has_first_token:
            self.has_first_token = True
            if self._num_cached_tokens is None:
                self._num_cached_tokens = delta.num_cached_tokens

    def _seen(self, delta: TokenDelta) -> TokenDelta:
        """Return a delta as the caller sees it: with the original request id and the first replica's cached tokens."""
        num_cached_tokens = self._num_cached_tokens
        if num_cached_tokens is None:
            num_cached_tokens = delta.num_cached_tokens if delta.token_ids else 0
        if self.num_attempts == 1 and delta.num_cached_tokens == num_cached_tokens:
            return delta
        return structs.replace(delta, request_id=self.request.request_id, num_cached_tokens=num_cached_tokens)


def _most_top(logprobs: Collection[TokenLogprobs]) -> int:
    """Return the largest number of top tokens at one position."""
    return max((max(len(each.top_token_ids), len(each.top_logprobs)) for each in logprobs), default=0)
