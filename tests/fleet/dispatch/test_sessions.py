"""Where sessions went."""

from __future__ import annotations

from app.fleet.dispatch import Sessions


def test_a_session_is_where_its_last_request_went() -> None:
    sessions = Sessions()
    sessions.place("s", "a")
    sessions.place("s", "b")
    assert sessions.replica_of("s") == "b"
    assert sessions.replica_of("unknown") is None


def test_the_longest_unused_session_is_forgotten_first() -> None:
    sessions = Sessions(max_sessions=2)
    for session in ("old", "used", "old", "new"):
        sessions.place(session, "a")
    assert [sessions.replica_of(session) for session in ("old", "used", "new")] == ["a", None, "a"]
