"""What a caller hears for each thing that Ray and Serve may raise."""

from __future__ import annotations

from copy import copy

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from app.errors import CarouselError, ContextTooLong, Failure, Overloaded, Unavailable
from deployments.serve.transport import answer_of, to_carousel_error
from tests.kit.garbage import no_garbage


def as_raised_remotely(cause: Exception) -> Exception:
    """`cause` as Ray hands it to the caller: an instance of both its class and RayTaskError."""
    error = RayTaskError("generate", "Traceback: ...", cause)
    wrapped = error.as_instanceof_cause()
    assert isinstance(wrapped, Exception)
    return wrapped


def test_our_own_error_comes_out_of_rays_wrapping_with_all_it_carries() -> None:
    original = ContextTooLong("prompt has 9,211 tokens; this model accepts 8,192", param="messages")
    shown = to_carousel_error(as_raised_remotely(original))
    assert type(shown) is ContextTooLong
    assert (shown.message, shown.param, shown.code) == (original.message, "messages", "context_length_exceeded")


def test_overload_keeps_its_hint() -> None:
    shown = to_carousel_error(as_raised_remotely(Overloaded("full", retry_after_s=7.0)))
    assert isinstance(shown, Overloaded)
    assert shown.retry_after_s == 7.0


def test_serves_back_pressure_is_overload() -> None:
    assert isinstance(to_carousel_error(BackPressureError(3, 2)), Overloaded)


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("gone", None), TaskCancelledError()])
def test_a_replica_that_is_gone_is_unavailable(error: Exception) -> None:
    assert isinstance(to_carousel_error(error), Unavailable)


def test_a_bug_in_a_replica_is_a_failure_that_shows_nothing_of_it() -> None:
    shown = to_carousel_error(as_raised_remotely(ValueError("/secret/path")))
    assert type(shown) is Failure
    assert "secret" not in shown.message


@pytest.mark.parametrize(
    ("raised", "shown"),
    [(Overloaded("full"), Overloaded), (BackPressureError(3, 2), Overloaded), (ValueError("a bug"), Failure)],
)
async def test_an_error_of_another_process_is_freed_with_its_request(raised: Exception, shown: type[Exception]) -> None:
    async def call() -> None:
        error = copy(raised)
        try:
            raise error
        finally:
            if not isinstance(error, CarouselError):
                del error  # Ray keeps it in this frame; what is raised for it is not in the cycle

    async def request() -> None:
        with pytest.raises(shown):
            await answer_of(call())

    with no_garbage():
        await request()
