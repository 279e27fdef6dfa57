from __future__ import annotations

from collections.abc import Generator

import pytest
from ray.exceptions import RayTaskError

from app.errors import InvalidSetup
from app.jobs.runner import ReadingBroke
from deployments.bulk.pool_run import _until_it_breaks


def pieces_that_break(cause: Exception) -> Generator[list[object], None, None]:
    yield []
    raise RayTaskError(
        "prepare", "Traceback\nTo change retry attempts, configure Ray Data", cause
    ).as_instanceof_cause()


def test_a_mistake_in_the_settings_that_is_found_while_rows_are_read_ends_the_run_in_words() -> None:
    mistake = InvalidSetup("pooling: got cls")
    with pytest.raises(InvalidSetup) as raised:
        list(_until_it_breaks(pieces_that_break(mistake)))  # type: ignore[arg-type]
    assert str(raised.value) == str(mistake)


def test_rows_are_read_again_after_any_other_error_whose_own_words_are_logged() -> None:
    with pytest.raises(ReadingBroke, match=r"^the disk is gone$"):
        list(_until_it_breaks(pieces_that_break(OSError("the disk is gone"))))  # type: ignore[arg-type]
