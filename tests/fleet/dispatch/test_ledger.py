"""What an ingress has outstanding, and what replicas report beyond it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.fleet.dispatch import Candidate, Ledger, ReplicaReport
from app.fleet.dispatch.ledger import REPORT_LIFE_S, SPEED_LIFE_S
from tests.kit.fleet import make_report

NOTHING = (0, 0, 0)


def report(**fields: Any) -> ReplicaReport:
    """Of a replica that computes any number of requests at once, of unknown speed."""
    return make_report(**{"max_running": 10**6, "max_requests": 10**6, "tokens_per_s": 0.0, **fields})


def load_of(ledger: Ledger, replica_id: str, now: float = 0.0) -> Candidate:
    [found] = ledger.candidates([replica_id], now=now)
    return found


def work(ledger: Ledger, replica_id: str, now: float = 0.0) -> tuple[int, int, int]:
    load = load_of(ledger, replica_id, now)
    return load.num_requests, load.num_prefill_tokens, load.num_decode_tokens


def ledger_with(*request_ids: str, replica_id: str = "a") -> Ledger:
    ledger = Ledger()
    for request_id in request_ids:
        ledger.place(request_id, replica_id, num_prompt_tokens=100, num_expected_tokens=40)
    return ledger


def test_a_placed_request_weighs_with_its_prompt_and_its_expected_tokens_until_it_ends() -> None:
    ledger = ledger_with("one", "two")
    assert work(ledger, "a") == (2, 200, 80)
    ledger.end("one")
    assert work(ledger, "a") == (1, 100, 40)
    ledger.end("two")
    assert work(ledger, "a") == NOTHING


def test_the_first_tokens_show_that_the_prompt_is_computed_and_more_than_expected_weigh_one() -> None:
    ledger = ledger_with("one")
    ledger.progress("one", 1)
    assert work(ledger, "a") == (1, 0, 39)
    ledger.progress("one", 10)
    assert work(ledger, "a") == (1, 0, 29)
    ledger.progress("one", 1000)
    assert work(ledger, "a") == (1, 0, 1)


def test_a_request_that_is_placed_again_leaves_the_replica_it_was_on() -> None:
    ledger = ledger_with("one")
    ledger.progress("one", 8)
    ledger.place("one", "b", num_prompt_tokens=108, num_expected_tokens=32)
    assert work(ledger, "a") == NOTHING
    assert work(ledger, "b") == (1, 108, 32)


def test_tokens_and_ends_that_come_late_change_nothing() -> None:
    ledger = ledger_with("one")
    for _ in range(2):
        ledger.end("one")
        ledger.progress("one", 5)
    assert work(ledger, "a") == NOTHING


def test_what_a_replica_reports_beyond_our_share_is_added() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=3, num_waiting_tokens=150), now=0.0)
    assert work(ledger, "a") == (3, 150, 40 + 10)  # one placed request says little of how long outputs are
    ledger.place("two", "a", num_prompt_tokens=10, num_expected_tokens=10)
    assert work(ledger, "a") == (4, 160, 50 + 10)
    ledger.end("one")
    assert work(ledger, "a") == (3, 60, 10 + 10)


def test_prompts_of_others_count_as_the_replica_says_however_many_are_waiting() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=3, num_waiting_tokens=5000, num_prompt_tokens_of_others=70), now=0.0)
    assert work(ledger, "a") == (3, 100 + 70, 40 + 10)
    assert ledger.num_prefill_tokens("one") == 100


def test_a_report_from_before_our_last_placements_takes_nothing_of_ours_away() -> None:
    ledger = ledger_with("one", "two")
    ledger.note("a", report(num_requests=1, num_waiting_tokens=0), now=0.0)
    assert work(ledger, "a") == (2, 200, 80)


@pytest.mark.parametrize(
    ("num_own", "num_reported", "ended", "num_requests"),
    [pytest.param(2, 3, ("one", "two"), 1, id="ended-since"), pytest.param(0, 2, (), 4, id="on-their-way-there")],
)
def test_ours_are_not_taken_for_those_of_others(
    num_own: int, num_reported: int, ended: tuple[str, ...], num_requests: int
) -> None:
    ledger = ledger_with("one", "two")
    for request_id in ended:
        ledger.end(request_id)
    ledger.note("a", report(num_requests=num_reported, num_own=num_own), now=0.0)
    assert load_of(ledger, "a").num_requests == num_requests


def test_what_others_still_generate_is_estimated_from_our_own() -> None:
    ledger = Ledger()
    for number in range(500):
        ledger.place(f"past-{number}", "b", num_prompt_tokens=10, num_expected_tokens=100)
    ledger.note("a", report(num_requests=4, num_waiting_tokens=0), now=0.0)
    assert work(ledger, "a") == (4, 0, 200)  # half of each is left, on average


def test_old_reports_of_others_are_forgotten_and_ours_is_not() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=9, num_waiting_tokens=900), now=100.0)
    assert work(ledger, "a", now=100.0 + REPORT_LIFE_S) == (9, 900, 40 + 40)
    assert work(ledger, "a", now=100.1 + REPORT_LIFE_S) == (1, 100, 40)


def test_the_speed_of_a_replica_without_work_is_forgotten_in_time() -> None:
    ledger = Ledger()
    busy = report(num_requests=1, num_waiting_tokens=0, tokens_per_s=50.0)
    ledger.note("a", busy, now=100.0)
    later = 100.0 + SPEED_LIFE_S
    ledger.note("a", report(num_requests=0, num_waiting_tokens=0, tokens_per_s=50.0), now=later)
    assert load_of(ledger, "a", later).tokens_per_s == 50.0
    assert load_of(ledger, "a", later + 1).tokens_per_s == 0.0
    ledger.note("a", busy, now=later + 2)
    assert load_of(ledger, "a", later + 2).tokens_per_s == 50.0


def test_how_many_must_end_first_follows_from_what_a_replica_computes_at_once() -> None:
    ledger = ledger_with("one", "two")
    assert load_of(ledger, "a").num_ahead == 0
    for max_running, num_ahead in ((3, 0), (2, 1), (1, 2)):
        ledger.note("a", report(num_requests=2, num_waiting_tokens=0, max_running=max_running), now=0.0)
        assert load_of(ledger, "a").num_ahead == num_ahead


def test_loads_carry_what_is_known_of_this_request_on_each_replica() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=1, group="control", max_requests=1), now=0.0)
    ledger.note("b", report(max_requests=1), now=0.0)
    a, b = ledger.candidates(["a", "b"], now=0.0, num_cached_tokens={"b": 32}, session_replica_id="b")
    assert (a.is_full, a.num_cached_tokens, a.group, a.holds_session) == (True, 0, "control", False)
    assert (b.is_full, b.num_cached_tokens, b.group, b.holds_session) == (False, 32, "", True)


@pytest.mark.parametrize(
    ("num_background", "num_staying", "is_background", "is_full"),
    [(0, 0, False, True), (1, 0, False, False), (4, 0, False, False), (4, 4, False, True), (4, 0, True, True)],
)
def test_background_work_of_all_that_makes_way_fills_no_replica_but_for_its_like(
    num_background: int, num_staying: int, is_background: bool, is_full: bool
) -> None:
    ledger = Ledger()
    for number in range(2):  # ours
        ledger.place(
            f"{number}", "a", num_prompt_tokens=5, num_expected_tokens=5, is_background=number < num_background - 2
        )
    reported = report(
        num_requests=4,
        num_background=num_background,
        num_unpreemptible_background=num_staying,
        max_running=3,
        max_requests=4,
    )
    ledger.note("a", reported, now=0.0)
    [found] = ledger.candidates(["a"], now=0.0, is_background=is_background)
    assert (found.num_requests, found.is_full) == (4, is_full)


def test_background_work_looks_for_a_slot_and_not_for_a_place_in_a_queue() -> None:
    ledger = Ledger()
    ledger.note("a", report(num_requests=2, max_running=2, max_requests=9), now=0.0)
    found = [ledger.candidates(["a"], now=0.0, is_background=each)[0].is_full for each in (False, True)]
    assert found == [False, True]


def test_a_replica_that_has_not_reported_takes_as_many_requests_as_the_largest_of_the_others() -> None:
    ledger = ledger_with("one", "two", replica_id="new")
    assert not load_of(ledger, "new").is_full, "nothing is known of any"
    for max_requests, is_full in ((1, True), (2, True), (3, False)):
        ledger.note("a", report(max_requests=1), now=0.0)
        ledger.note("b", report(max_requests=max_requests), now=0.0)
        *_, new = ledger.candidates(["a", "b", "new"], now=0.0)
        assert (new.is_full, new.has_slot, new.is_suspect) == (is_full, True, False)


def test_a_slot_is_free_where_fewer_run_than_are_computed_at_once_and_the_replica_is_awake() -> None:
    ledger = ledger_with("one", "two")
    for max_running, state, has_slot in ((3, "awake", True), (2, "awake", False), (3, "asleep", False)):
        ledger.note("a", report(num_requests=2, max_running=max_running, state=state), now=0.0)
        assert load_of(ledger, "a").has_slot == has_slot


def test_a_report_says_how_soon_a_replica_computes_with_which_weights_and_ends_a_suspicion() -> None:
    ledger = Ledger()
    ledger.replica("a").is_suspect = True
    found = load_of(ledger, "a")
    assert (found.is_suspect, found.wake_s, found.weights, found.tokens_per_s) == (True, 0.0, 0, 0.0)
    ledger.note("a", report(wake_s=2.5, weights=7, num_requests=1, tokens_per_s=30.0), now=0.0)
    found = load_of(ledger, "a")
    assert (found.is_suspect, found.wake_s, found.weights, found.tokens_per_s) == (False, 2.5, 7, 30.0)


def test_background_requests_of_others_are_what_a_replica_reports_beyond_ours_and_no_more_than_all_of_theirs() -> None:
    ledger = Ledger()
    ledger.place("ours", "a", num_prompt_tokens=5, num_expected_tokens=5, is_background=True)
    full = report(num_requests=3, num_background=3, max_requests=1)
    ledger.note("a", full, now=0.0)
    assert not load_of(ledger, "a").is_full, "all three give way"
    ledger.end("ours")
    assert not load_of(ledger, "a").is_full
    ledger.note("a", report(num_requests=1, num_background=3, max_requests=1), now=0.0)
    assert not load_of(ledger, "a").is_full
    ledger.note("a", report(num_requests=3, num_background=2, max_requests=1), now=0.0)
    assert load_of(ledger, "a").is_full


def test_prompts_that_a_replica_reports_count_though_no_request_of_others_does() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=1, num_waiting_tokens=130), now=0.0)
    assert work(ledger, "a") == (1, 130, 40)


def test_a_request_of_which_no_token_is_expected_weighs_one_until_it_ends() -> None:
    ledger = Ledger()
    ledger.place("one", "a", num_prompt_tokens=3, num_expected_tokens=0)
    assert work(ledger, "a") == (1, 3, 1)
    ledger.progress("one", 1)
    assert work(ledger, "a") == (1, 0, 1)
    ledger.end("one")
    assert work(ledger, "a") == NOTHING


def test_a_replica_that_stays_keeps_its_requests_when_another_goes() -> None:
    ledger = ledger_with("one")
    ledger.place("two", "b", num_prompt_tokens=7, num_expected_tokens=9)
    ledger.keep_only(["b"])
    assert work(ledger, "b") == (1, 7, 9)
    ledger.progress("two", 4)
    assert work(ledger, "b") == (1, 0, 5)
    ledger.end("two")
    assert work(ledger, "b") == NOTHING


def test_a_replica_that_is_gone_takes_everything_along() -> None:
    ledger = ledger_with("one")
    ledger.note("a", report(num_requests=9, num_waiting_tokens=900, tokens_per_s=5.0), now=0.0)
    ledger.keep_only({"b"})
    ledger.end("one")
    assert load_of(ledger, "a").tokens_per_s == 0
    assert work(ledger, "a") == NOTHING


REQUESTS = st.sampled_from([f"request-{number}" for number in range(6)])
REPLICAS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 500)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, late and repeated ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0

    @rule(request_id=REQUESTS, replica_id=REPLICAS, prompt=COUNTS, expected=st.integers(1, 500))
    def place(self, request_id: str, replica_id: str, prompt: int, expected: int) -> None:
        self.ledger.place(request_id, replica_id, num_prompt_tokens=prompt, num_expected_tokens=expected)

    @rule(request_id=REQUESTS, tokens=COUNTS)
    def progress(self, request_id: str, tokens: int) -> None:
        self.ledger.progress(request_id, tokens)

    @rule(request_id=REQUESTS)
    def end(self, request_id: str) -> None:
        self.ledger.end(request_id)

    @rule(replica_id=REPLICAS, requests=COUNTS, prefill=COUNTS)
    def correct(self, replica_id: str, requests: int, prefill: int) -> None:
        self.ledger.note(replica_id, report(num_requests=requests, num_waiting_tokens=prefill), now=self.now)

    @rule(kept=st.sets(REPLICAS))
    def keep_only(self, kept: set[str]) -> None:
        self.ledger.keep_only(kept)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_negative(self) -> None:
        for replica_id in ("a", "b", "c"):
            assert min(work(self.ledger, replica_id, self.now)) >= 0

    def teardown(self) -> None:
        for number in range(6):
            self.ledger.end(f"request-{number}")
        for replica_id in ("a", "b", "c"):
            assert work(self.ledger, replica_id, self.now + REPORT_LIFE_S + 1) == NOTHING


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedgerUnderAnyEvents = LedgerMachine.TestCase
