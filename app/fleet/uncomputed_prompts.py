"""Counts the prompt tokens that a replica has not computed, so that an ingress knows the other ingresses' work."""

from __future__ import annotations

from collections.abc import Callable

# A change of at least this size is reported at once, because another ingress may be choosing a replica now. Smaller
# changes are reported in the next frame. In a simulation of 100 replicas at 80% load, 22% of the requests cause a
# change of this size (docs/results/service.md).
MIN_NEWS_TOKENS = 256


class UncomputedPrompts:
    """The uncomputed prompt tokens of one replica, for all ingresses. The object belongs to one event loop.

    With each request, an ingress sends the number of tokens that it expects the replica to compute: the tokens that the
    replica has not cached. These tokens count until the request's first token is generated.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.shares: dict[PromptShare, None] = {}  # in the order in which they were opened

    def open(self, on_news: Callable[[], object]) -> PromptShare:
        """Return a new ingress's share. `on_news` is called after a large change in the other ingresses' tokens."""
        share = PromptShare(self, on_news)
        self.shares[share] = None
        return share


class PromptShare:
    """The prompt tokens of one ingress, and the number of other ingresses' tokens that was last reported to it."""

    def __init__(self, prompts: UncomputedPrompts, on_news: Callable[[], object]) -> None:
        self._prompts = prompts
        self._on_news = on_news
        self._tokens: dict[str, int] = {}  # by request id
        self._num_tokens = 0
        self._told = 0

    @property
    def num_of_others(self) -> int:
        """Uncomputed prompt tokens of the requests from other ingresses."""
        return self._prompts.num_tokens - self._num_tokens

    def take(self) -> int:
        """Return `num_of_others` and remember it as the number that was reported to the ingress."""
        self._told = self.num_of_others
        return self._told

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count the prompt of a new request."""
        self._tokens[request_id] = self._tokens.get(request_id, 0) + num_tokens
        self._change(num_tokens)

    def end(self, request_id: str) -> None:
        """Stop counting a prompt, after the first token or the end of its request. Unknown requests are ignored."""
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
            if each is not self and abs(each.num_of_others - each._told) >= MIN_NEWS_TOKENS:
                each._on_news()
