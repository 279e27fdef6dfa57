"""What a decision is made from: the load of each replica, and the size of the request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What is known of one replica when a request is to be placed."""

    replica_id: str
    num_requests: int = 0  # sent there and not ended
    num_prefill_tokens: int = 0  # of their prompts, not computed yet
    num_decode_tokens: int = 0  # that they are expected still to generate
    num_ahead: int = 0  # of those requests, how many must end before another one is computed
    tokens_per_s: float = 0.0  # in a step of a given size, the same for all replicas; 0: not known
    num_cached_tokens: int = 0  # of this request's prompt that the replica should have in its KV memory
    holds_session: bool = False  # the request before of the same session went there
    group: str = ""  # of an A/B trial; "": none
    is_full: bool = False  # it would refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """What a request will add to the load of its replica."""

    num_prompt_tokens: int
    num_expected_tokens: int  # to be generated
