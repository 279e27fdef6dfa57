"""Counts the prompt tokens that a replica has still to compute, so that each ingress knows the work of the others."""

from __future__ import annotations

from collections.abc import Callable

# A change by this many tokens is reported at once: another ingress may be choosing a replica now. Smaller changes come
# with the next frame. In a simulation of 100 replicas at 80% load, 22% of the requests bring such a change
# (docs/results/scale.md).
MIN_NEWS_TOKENS = 256


class UncomputedPrompts:
    """The prompts of all ingresses on one replica. Belongs to one event loop.

    An ingress says with each request how many tokens it expects the replica to compute, which are those that are not
    cached there. They count until the first token of the request comes.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.shares: dict[PromptShare, None] = {}  # in the order of their opening

    def open(self, on_news: Callable[[], object]) -> PromptShare:
        """Return the share of a new ingress. Its `on_news` is called when the tokens of the others change by much."""
        share = PromptShare(self, on_news)
        self.shares[share] = None
        return share


class PromptShare:
    """The prompts of one ingress, and what the ingress was last told of the others."""

    def __init__(self, prompts: UncomputedPrompts, on_news: Callable[[], object]) -> None:
        self._prompts = prompts
        self._on_news = on_news
        self._tokens: dict[str, int] = {}  # by request id
        self._num_tokens = 0
        self._told = 0

    @property
    def num_of_others(self) -> int:
        """Prompt tokens that the requests of other ingresses wait for."""
        return self._prompts.num_tokens - self._num_tokens

    def take(self) -> int:
        """Return `num_of_others` for a report to the ingress."""
        self._told = self.num_of_others
        return self._told

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count the prompt of a new request."""
        self._tokens[request_id] = self._tokens.get(request_id, 0) + num_tokens
        self._change(num_tokens)

    def end(self, request_id: str) -> None:
        """Stop counting a prompt: its first token has come, or its request has ended. Other requests are ignored."""
        num_tokens = self._tokens.pop(request_id, 0)
        if num_tokens:
            self._change(-num_tokens)

    def close(self) -> None:
        """Stop counting all prompts of the ingress, which is told no more."""
        self._prompts.shares.pop(self, None)
        self._tokens.clear()
        self._change(-self._num_tokens)

    def _change(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._prompts.num_tokens += num_tokens
        for each in list(self._prompts.shares):
            if each is not self and abs(each.num_of_others - each._told) >= MIN_NEWS_TOKENS:
                each._on_news()
