"""Counts a replica's uncomputed prompt tokens, so that each ingress knows the load from the other ingresses."""

from __future__ import annotations

from collections.abc import Callable

# A change of at least this size is reported immediately, because another ingress may be choosing a replica now. Smaller
# changes are reported in the next frame. In a simulation of 100 replicas at 80% load, 22% of the requests cause a
# change of this size (docs/results/service.md).
MIN_NEWS_TOKENS = 256


class UncomputedPrompts:
    """The uncomputed prompt tokens of one replica, for all ingresses. Used in one event loop only.

    With each request, an ingress sends its estimate of the prompt tokens that the replica has not cached and must
    compute. These tokens count until the request's first token is generated.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.shares: dict[PromptShare, None] = {}  # in the order in which they were opened

    def open(self, on_news: Callable[[], object]) -> PromptShare:
        """Return a share for a new ingress. `on_news` is called after a large change in other ingresses' tokens."""
        share = PromptShare(self, on_news)
        self.shares[share] = None
        return share


class PromptShare:
    """The uncomputed prompt tokens of one ingress, and the last number that was reported to it."""

    def __init__(self, prompts: UncomputedPrompts, on_news: Callable[[], object]) -> None:
        self._prompts = prompts
        self._on_news = on_news
        self._tokens: dict[str, int] = {}  # by request id
        self._num_tokens = 0
        self._reported = 0

    @property
    def num_of_others(self) -> int:
        """Uncomputed prompt tokens from other ingresses."""
        return self._prompts.num_tokens - self._num_tokens

    def take(self) -> int:
        """Return `num_of_others`, and remember it as the number last reported to the ingress."""
        self._reported = self.num_of_others
        return self._reported

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count the prompt of a new request."""
        self._tokens[request_id] = self._tokens.get(request_id, 0) + num_tokens
        self._change(num_tokens)

    def end(self, request_id: str) -> None:
        """Stop counting a prompt when its request generates a token or ends. Unknown requests are ignored."""
        num_tokens = self._tokens.pop(request_id, 0)
        if num_tokens:
            self._change(-num_tokens)

    def close(self) -> None:
        """Stop counting all prompts of the ingress, and stop reporting to it."""
        self._prompts.shares.pop(self, None)
        self._tokens.clear()
        self._change(-self._num_tokens)

    def _change(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._prompts.num_tokens += num_tokens
        for each in list(self._prompts.shares):
            if each is not self and abs(each.num_of_others - each._reported) >= MIN_NEWS_TOKENS:
                each._on_news()
