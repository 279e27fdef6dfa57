"""What an API key changes about a call: its tenant, the salt of its cached prefixes, how long its outputs may be."""

from __future__ import annotations

from dataclasses import replace

from app.api.auth.limits import Account, Reservation
from app.api.call import Call
from app.api.schemas.requests import QueuedRequest
from app.engine.request import Request
from app.errors import InvalidRequest


def apply_key(reservation: Reservation, call: Call, body: QueuedRequest, *, share_prefixes: bool) -> Call:
    """The call as its key allows it, with the tokens that it may need reserved on the key's account.

    The key's name is the tenant, whatever the body says of its `user`, and without `share_prefixes` part of the cache
    salt. Raises InvalidRequest for outputs that are too long for the key, and LimitReached.
    """
    account = reservation.account
    max_tokens = account.max_tokens(body.asked_tokens, body.length_param)
    if account.name:
        call = replace(
            call,
            requests=tuple(_owned(each, account.name, share_prefixes=share_prefixes) for each in call.requests),
        )
    if max_tokens is not None:
        call = replace(call, requests=tuple(_shortened(each, max_tokens) for each in call.requests))
    reservation.reserve(call.num_prompt_tokens + sum(request.sampling.max_tokens for request in call.requests))
    return call


def max_output_tokens(account: Account, call: Call, body: QueuedRequest) -> int | None:
    """How long an output of the call may become where the key bounds it; None where it does not.

    Raises InvalidRequest for outputs that are too long for the key.
    """
    cap = account.max_tokens(body.asked_tokens, body.length_param)
    return None if cap is None else max(_shortened(each, cap).sampling.max_tokens for each in call.requests)


def _owned(request: Request, name: str, *, share_prefixes: bool) -> Request:
    # No name has a line end, so no two keys can agree on a salt.
    salt = request.cache_salt if share_prefixes else f"{name}\n{request.cache_salt}"
    return replace(request, tenant=name, cache_salt=salt)


def _shortened(request: Request, max_tokens: int) -> Request:
    sampling = request.sampling
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens:,}; this API key may have at most {max_tokens:,}", param="min_tokens"
        )
    return replace(request, sampling=replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens)))
