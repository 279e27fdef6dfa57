"""The boards of this process, by deployment: where Serve's router and our fleet meet.

Serve pickles the router's module by value, so nothing in it is shared; what it imports while it runs is.
"""

from __future__ import annotations

from app.fleet import Board

_boards: dict[str, Board] = {}


def post(deployment: str, board: Board) -> None:
    """Make the board known under which the router of this deployment routes. The handle must not have been used yet."""
    _boards[deployment] = board


def board_of(deployment: str) -> Board | None:
    """The board of a deployment; None where no fleet has posted one: any order will do there."""
    return _boards.get(deployment)
