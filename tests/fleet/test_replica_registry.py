from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.block_pool import BlockPool
from app.engine.prefix import Prefix, digests_of
from app.engine.request import Adapter, Address, PrefixSource, Request
from app.errors import InvalidRequest, Overloaded, Unavailable
from app.fleet import ReplicaRegistry
from app.fleet.dispatch import Candidate, Group, GroupChooser, PrefixChanges, make_policy
from app.fleet.prefix_feed import PrefixFeed
from app.fleet.replica_registry import FULL_LIFE_S, SOME
from tests.kit.engine import FakeClock, make_request
from tests.kit.fleet import make_report

REPLICAS = ("a", "b")


def make_registry(
    dispatch: str = "least_loaded", *, groups: Sequence[Group] = (), replica_ids: Sequence[str] = REPLICAS
) -> ReplicaRegistry:
    registry = ReplicaRegistry(
        make_policy(dispatch, random.Random(0)), GroupChooser(groups), block_size=4, clock=FakeClock()
    )
    registry.set_replicas(replica_ids)
    for replica_id in replica_ids:
        registry.note(replica_id, make_report())
    return registry


def place(registry: ReplicaRegistry, prompt: tuple[int, ...] = (5, 6, 7), **fields: object) -> tuple[Request, str]:
    """Place a request where the registry prefers it; the request and the replica's id."""
    request = replace(make_request(prompt), **fields)  # type: ignore[arg-type]
    return request, registry.place(request, REPLICAS).replica_id


def test_requests_of_the_same_moment_see_each_other() -> None:
    registry = make_registry()
    assert sorted(place(registry)[1] for _ in range(8)) == ["a"] * 4 + ["b"] * 4


def test_a_suspect_is_tried_last_until_it_reports() -> None:
    registry = make_registry()
    registry.suspect("a")
    assert {place(registry)[1] for _ in range(6)} == {"b"}
    registry.note("a", make_report())
    assert place(registry)[1] == "a"


def test_a_replica_that_has_just_refused_is_tried_last() -> None:
    registry = make_registry()
    assert [registry.place(make_request(), REPLICAS, avoid={"b"}).replica_id for _ in range(5)] == ["a"] * 5
    assert registry.place(make_request(), ["b"], avoid={"b"}).replica_id == "b"


def test_a_known_prefix_and_a_session_go_where_they_were_before() -> None:
    registry = make_registry("prefix_affinity")
    prompt = tuple(range(2, 1_002))
    _, first = place(registry, prompt)
    assert {place(registry, (*prompt, n))[1] for n in range(6)} == {first}, "those of a moment see each other"
    registry = make_registry("prefix_affinity")
    _, first = place(registry, (9,), session="mine")
    assert {place(registry, (n,), session="mine")[1] for n in range(6)} == {first}


@pytest.mark.parametrize("dispatch", ["least_loaded", "round_robin", "prefix_affinity"])
def test_the_requests_of_a_call_go_to_the_replica_of_the_first(dispatch: str) -> None:
    registry = make_registry(dispatch)
    request, first = place(registry, (9,), call="one")
    registry.end(request.request_id)
    [other] = {*REPLICAS} - {first}
    registry.note(first, make_report(num_requests=6, num_waiting_tokens=9000))  # of other clients
    assert {place(registry, (n,), call="one")[1] for n in range(3)} == {first}
    assert place(registry, (9,), call="two")[1] == other
    registry.note(first, make_report(num_requests=10))
    assert place(registry, (9,), call="one")[1] == other, "the first is full"
    registry.set_replicas([other])
    assert registry.place(replace(make_request(), call="one"), [other]).replica_id == other


def test_a_prefix_is_where_a_replica_says_that_it_is() -> None:
    registry, other = make_registry("prefix_affinity"), make_registry("prefix_affinity")
    prompt = tuple(range(2, 42))
    pool, feed = BlockPool(num_blocks=20, block_size=4), PrefixFeed()
    pool.on_prefixes(feed.note)
    readers = {registry: feed.open(), other: feed.open()}
    parent: Prefix | str = ""
    blocks = pool.allocate(10)
    for number, block in enumerate(blocks):
        parent = pool.cache_full_block(block, prompt[4 * number : 4 * number + 4], parent=parent)
    for each, reader in readers.items():
        each.note("b", make_report(), reader.take())
        assert {place(each, (*prompt, n))[1] for n in range(6)} == {"b"}, "though nothing was sent through it"
    pool.free(blocks)
    pool.clear_cache()
    request, _ = place(other, prompt)
    other.end(request.request_id)
    other.note("b", make_report(), readers[other].take())
    assert other.last_decision is not None
    place(other, tuple(range(100, 140)))
    assert {each.num_cached_tokens for each in other.last_decision.candidates} == {0}


@pytest.mark.parametrize(("num_blocks", "num_fetched"), [(100, 100), (10, None)])
def test_the_beginning_of_a_prompt_is_fetched_from_the_replica_that_has_much_of_it(
    num_blocks: int, num_fetched: int | None
) -> None:
    registry, feed, address = make_registry("round_robin"), PrefixFeed(), Address("host", 1, "secret")
    prompt = tuple(range(2, 500))
    for number, digest in enumerate(digests_of(prompt, salt="", block_size=4)[:num_blocks], start=1):
        feed.note(SimpleNamespace(digest=digest, num_blocks=number), True)
    for at in (None, address):  # it can be fetched once it is known from where
        feed.address = at
        registry.note("b", make_report(), feed.open().take())
        for _ in range(2):
            request = make_request(prompt)
            decision = registry.place(request, REPLICAS)
            registry.end(request.request_id)
            expected = None
            if decision.replica_id == "a" and at is not None and num_fetched is not None:
                expected = PrefixSource(address, num_fetched)
            assert registry.prefix_at(decision) == expected
    assert registry.addresses == {"b": address}
    registry.set_replicas(["a"])
    assert not registry.addresses


def test_a_decision_can_be_explained_with_the_numbers_of_all_candidates() -> None:
    registry = make_registry()
    decision = registry.place(make_request(), REPLICAS)
    first = decision.replica_id
    assert decision.reason == f"least_loaded: {first}, the least work"
    assert all(replica_id in decision.explain_loads() for replica_id in REPLICAS)


def test_when_all_are_full_the_request_is_refused_before_it_is_sent() -> None:
    registry = make_registry()
    for replica_id in REPLICAS:
        registry.note(replica_id, make_report(num_requests=10))
    with pytest.raises(Overloaded, match=r"all 2 replicas are full \(20 requests\)") as refused:
        registry.place(make_request(), REPLICAS)
    assert refused.value.retry_after_s == pytest.approx(1 / 8)  # two replicas end four a second each
    with pytest.raises(Overloaded) as refused:
        registry.place(make_request(), REPLICAS)
    assert refused.value.retry_after_s == pytest.approx(2 / 8)
    registry.note("b", make_report(num_requests=9))
    registry.place(make_request(), REPLICAS)


def test_a_request_that_is_not_to_wait_goes_where_a_slot_is_free_or_is_refused() -> None:
    registry = make_registry("round_robin")
    registry.note("a", make_report(num_requests=8))
    request = replace(make_request(), no_queue=True)
    assert registry.place(request, REPLICAS).replica_id == "b"
    registry.note("b", make_report(num_requests=8))
    with pytest.raises(Overloaded, match="none of the 2 replicas has a free slot") as refused:
        registry.place(replace(make_request(), no_queue=True), REPLICAS)
    assert refused.value.retry_after_s > 0
    registry.place(make_request(), REPLICAS)
    registry.note("a", make_report(num_requests=8, num_background=8))
    assert registry.place(replace(make_request(), no_queue=True), REPLICAS).replica_id == "a", (
        "background work gives way"
    )
    with pytest.raises(Overloaded):
        registry.place(replace(make_request(), no_queue=True), REPLICAS, avoid={"a"})


@pytest.mark.parametrize("fields", [{"no_queue": True}, {"is_background": True}])
def test_refused_requests_that_would_not_wait_put_no_other_off(fields: dict[str, bool]) -> None:
    registry = make_registry()
    for replica_id in REPLICAS:
        registry.note(replica_id, make_report(num_requests=10))
    for number in range(1_001):
        with pytest.raises(Overloaded) as refused:
            registry.place(replace(make_request(), **fields), REPLICAS)
        assert refused.value.retry_after_s == pytest.approx(1 / 8), number
    with pytest.raises(Overloaded) as refused:
        registry.place(make_request(), REPLICAS)
    assert refused.value.retry_after_s == pytest.approx(1 / 8)


def test_a_request_goes_to_its_group_and_to_any_replica_when_that_is_gone() -> None:
    registry = make_registry(groups=(Group("old", 1.0), Group("new", 1.0)))
    registry.note("a", make_report(group="old", max_requests=100))
    registry.note("b", make_report(group="new", max_requests=100))
    assert {place(registry, group="new")[1] for _ in range(5)} == {"b"}
    assert {place(registry)[1] for _ in range(40)} == {"a", "b"}
    request = replace(make_request(), group="new")
    assert registry.place(request, ["a"]).replica_id == "a"
    with pytest.raises(InvalidRequest, match="there is no group 'newest'; send one of old, new"):
        registry.place(replace(make_request(), group="newest"), REPLICAS)


def test_what_a_sleeping_replica_had_cached_is_forgotten_and_its_slot_is_not_free_at_once() -> None:
    registry = make_registry("prefix_affinity")
    prompt = tuple(range(64))
    registry.note("a", make_report())
    request, first = place(registry, prompt)
    other = next(each for each in REPLICAS if each != first)
    registry.end(request.request_id)
    registry.note(first, make_report(state="asleep", wake_s=1.0), PrefixChanges(held=b"", is_all=True))
    assert place(registry, prompt)[1] == other
    with pytest.raises(Overloaded, match="free slot"):
        registry.place(replace(make_request(), no_queue=True), [first])
    described = {each["replica"]: each["sleep"] for each in registry.describe()}
    assert described[first] == "asleep"


def test_it_tells_how_it_sees_every_replica() -> None:
    registry = make_registry()
    registry.set_replicas([*REPLICAS, "new"])
    registry.note("a", make_report(group="x", num_requests=10, max_requests=10))
    registry.suspect("b")
    full, silent, new = registry.describe()
    assert (full["replica"], full["group"], full["is_full"], full["is_suspect"]) == ("a", "x", True, False)
    assert (full["requests"], full["max_requests"], full["tokens_per_s"]) == (10, 10, 100.0)
    assert (silent["is_suspect"], silent["is_full"], silent["requests"]) == (True, False, 0)
    assert (new["replica"], new["max_requests"], new["step_age_s"]) == ("new", None, None)
    assert full["last_dispatch"] is None


def test_it_tells_why_each_replica_got_its_last_request() -> None:
    registry = make_registry()
    registry.place(make_request(request_id="one"), ["a", "b"])
    registry.place(make_request(request_id="two"), ["a", "b"])
    told = {each["replica"]: each["last_dispatch"] for each in registry.describe()}
    assert told["a"].startswith("the least work: a (0 prompt + 0 output + ")
    assert told["b"].startswith("the least work: b (")
    registry.set_replicas(["b"])
    assert [each["last_dispatch"] for each in registry.describe()] == [told["b"]]


def test_a_replica_that_leaves_takes_nothing_more_and_is_told_of() -> None:
    registry = make_registry()
    told: list[list[str]] = []
    registry.on_replicas = lambda replica_ids: told.append(sorted(replica_ids))
    registry.set_replicas(["b", "c"])
    registry.note("a", make_report())  # it is still ending what it has
    assert told == [["b", "c"]]
    assert sorted(registry.replica_ids) == ["b", "c"]
    assert list(registry.reports) == ["b"]


def test_a_replica_that_leaves_does_not_come_back_with_its_next_prefixes() -> None:
    registry = make_registry("prefix_affinity")
    prompt = tuple(range(2, 42))
    held = array("q", digests_of(prompt, salt="", block_size=4)).tobytes()
    all_prefixes = PrefixChanges(held=held, is_all=True, address=("host", 1, "secret"))
    registry.note("a", make_report(), all_prefixes)
    assert registry.addresses
    registry.set_replicas(["b"])
    for prefixes in (PrefixChanges(held=held), all_prefixes):  # of the stream that is open, and of another one
        registry.note("a", make_report(), prefixes)
        assert not registry.addresses
        assert not registry._prefixes.match(digests_of(prompt, salt="", block_size=4))


def test_a_replica_that_is_gone_takes_its_account_with_it() -> None:
    """A service that rolls out new versions for months sees thousands come and go."""
    registry = make_registry()
    registry.note("a", make_report(num_requests=9))
    registry.set_replicas(["b"])
    registry.set_replicas(REPLICAS)
    decision = registry.place(make_request(), REPLICAS)
    assert {candidate.replica_id: candidate.num_ahead for candidate in decision.candidates} == {"a": 0, "b": 0}


SQL = Adapter(name="sql", path="/sql", digest="5c1")


def test_a_request_with_an_adapter_goes_where_it_is_loaded() -> None:
    registry = make_registry()
    registry.note("a", make_report(adapters=()))
    registry.note("b", make_report(adapters=(SQL.digest,)))
    assert {place(registry, adapter=SQL)[1] for _ in range(8)} == {"b"}
    assert {place(registry)[1] for _ in range(2)} == {"a"}


def test_and_elsewhere_when_that_replica_has_much_more_to_do() -> None:
    registry = make_registry()
    registry.note("a", make_report(adapters=()))
    registry.note("b", make_report(adapters=(SQL.digest,)))
    for _ in range(2):
        registry.place(make_request(tuple(range(2, 5002))), ["b"])
    assert place(registry, adapter=SQL)[1] == "a"


def test_two_requests_of_one_moment_have_an_adapter_loaded_once() -> None:
    registry = make_registry()
    for replica_id in REPLICAS:
        registry.note(replica_id, make_report(adapters=()))
    assert len({place(registry, adapter=SQL)[1] for _ in range(8)}) == 1


def test_a_replica_that_knows_no_adapters_gets_no_request_with_one() -> None:
    registry = make_registry()
    registry.note("b", make_report(adapters=()))
    assert {place(registry, adapter=SQL)[1] for _ in range(4)} == {"b"}
    registry.note("b", make_report())
    with pytest.raises(Unavailable, match="no replica that supports LoRA adapters"):
        place(registry, adapter=SQL)


def test_prefixes_are_known_by_adapter() -> None:
    registry = make_registry("prefix_affinity")
    for replica_id in REPLICAS:
        registry.note(replica_id, make_report(adapters=(SQL.digest,)))
    prompt = tuple(range(2, 42))
    place(registry, prompt, adapter=SQL)
    place(registry, prompt)
    assert registry.last_decision is not None
    assert registry.last_decision.candidates[0].num_cached_tokens == 0
    place(registry, prompt, adapter=replace(SQL, digest="other content"))
    assert registry.last_decision.candidates[0].num_cached_tokens == 0
    place(registry, prompt, adapter=SQL)
    assert registry.last_decision.candidates[0].num_cached_tokens > 0


MANY = tuple(f"r{number:03d}" for number in range(500))


def large_registry(dispatch: str = "least_loaded", *, groups: Sequence[Group] = ()) -> ReplicaRegistry:
    return make_registry(dispatch, groups=groups, replica_ids=MANY)


def test_of_a_large_fleet_some_replicas_are_looked_at_for_each_request() -> None:
    registry = large_registry()
    chosen = set()
    for number in range(300):
        decision = registry.place(make_request(request_id=str(number)), MANY)
        assert len(decision.candidates) <= SOME
        chosen.add(decision.replica_id)
    assert len(chosen) > 250, "nearly all are idle, so a busy one is hardly taken"


def test_the_replica_that_is_full_is_not_taken_while_one_of_500_is_not() -> None:
    registry = large_registry()
    for replica_id in MANY:
        if replica_id != "r123":
            registry.note(replica_id, make_report(num_requests=10))
    assert registry.place(make_request(), MANY).replica_id == "r123"
    registry.note("r123", make_report(num_requests=10))
    with pytest.raises(Overloaded, match=r"all 500 replicas are full \(5,0\d\d requests\)"):
        registry.place(make_request(request_id="next"), MANY)


def placed(registry: ReplicaRegistry, request_id: str, prompt: tuple[int, ...] = (5, 6, 7)) -> str:
    return registry.place(make_request(prompt, request_id=request_id), registry.replica_ids).replica_id


def count_looked_at(registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replicas the ledger was asked for, each time."""
    numbers: list[int] = []
    candidates = registry._ledger.candidates

    def counted(replica_ids: Iterable[str], **more: Any) -> list[Candidate]:
        found = candidates(replica_ids, **more)
        numbers.append(len(found))
        return found

    monkeypatch.setattr(registry._ledger, "candidates", counted)
    return numbers


def test_refusals_of_a_full_fleet_look_at_no_replica_until_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = large_registry()
    for replica_id in MANY:
        registry.note(replica_id, make_report(num_requests=9))
    owners = {placed(registry, str(number)): str(number) for number in range(500)}
    assert len(owners) == 500
    looked_at = count_looked_at(registry, monkeypatch)
    for _ in range(100):
        with pytest.raises(Overloaded, match=r"all 500 replicas are full \(5,000 requests\)"):
            placed(registry, "refused")
    assert sum(looked_at) < 2 * 500, "the first refusal alone looks at all"
    looked_at.clear()
    registry.note("r007", make_report(num_requests=10, num_own=1))
    registry.end(owners["r123"])
    assert placed(registry, "next") == "r123"
    with pytest.raises(Overloaded, match="all 500"):
        placed(registry, "refused")
    registry.note("r007", make_report(num_requests=9, num_own=1))
    assert placed(registry, "last") == "r007"
    assert sum(looked_at) < 10
    registry._clock.advance(FULL_LIFE_S)  # type: ignore[attr-defined]
    with pytest.raises(Overloaded):
        placed(registry, "refused")
    assert sum(looked_at) > 500, "reports grow old, and no one tells"


def test_a_full_replica_of_a_large_fleet_is_a_source_of_the_prefix_that_it_has() -> None:
    registry = large_registry("prefix_affinity")
    prompt, address = tuple(range(300)), ("host", 1, "key")
    digests = array("q", digests_of(prompt, salt="", block_size=4)).tobytes()
    registry.note("r042", make_report(num_requests=10), PrefixChanges(digests, is_all=True, address=address))
    decision = registry.place(make_request(prompt), registry.replica_ids)
    assert decision.replica_id != "r042"
    assert registry.prefix_at(decision) == PrefixSource(Address(*address), 72)


def test_a_request_that_must_not_wait_finds_the_one_free_slot_of_500() -> None:
    registry = large_registry()
    for replica_id in MANY:
        registry.note(replica_id, make_report(num_requests=0 if replica_id == "r321" else 4, max_running=4))
    request = replace(make_request(), no_queue=True)
    for number in range(4):
        assert registry.place(replace(request, request_id=str(number)), MANY).replica_id == "r321"
    with pytest.raises(Overloaded, match="none of the 500 replicas has a free slot"):
        registry.place(request, MANY)


@pytest.mark.parametrize("dispatch", ["least_loaded", "prefix_affinity", "round_robin"])
def test_what_has_just_refused_or_is_suspect_is_passed_over_in_a_large_fleet(dispatch: str) -> None:
    registry = large_registry(dispatch)
    for replica_id in MANY[1::2]:
        registry.suspect(replica_id)
    avoid = set(MANY[::4])
    chosen = {registry.place(make_request(request_id=str(n)), MANY, avoid=avoid).replica_id for n in range(100)}
    assert chosen <= set(MANY[2::4])


def test_turns_go_through_a_large_fleet() -> None:
    registry = large_registry("round_robin")
    chosen = [registry.place(make_request(request_id=str(number)), MANY).replica_id for number in range(1000)]
    assert chosen == [*MANY, *MANY]


def test_prefixes_sessions_calls_and_adapters_are_found_in_a_large_fleet() -> None:
    registry = large_registry("prefix_affinity")
    for replica_id in MANY:
        registry.note(replica_id, make_report(adapters=(SQL.digest,) if replica_id == "r077" else ()))
    prompt = tuple(range(2, 42))
    held = PrefixChanges(array("q", digests_of(prompt, salt="", block_size=4)).tobytes())
    registry.note("r200", make_report(adapters=()), held)

    def placed(request_id: str, tokens: tuple[int, ...] = (5,), **fields: object) -> str:
        return registry.place(replace(make_request(tokens, request_id=request_id), **fields), MANY).replica_id

    assert placed("prefix", (*prompt, 7)) == "r200"
    first = placed("session", session="mine")
    assert {placed(f"session {n}", session="mine") for n in range(5)} == {first}
    first = placed("call", call="one")
    assert {placed(f"call {n}", call="one") for n in range(5)} == {first}
    assert {placed(f"adapter {n}", adapter=SQL) for n in range(5)} == {"r077"}


def test_groups_of_a_large_fleet_get_their_requests() -> None:
    groups = [Group("usual", 0.98), Group("new", 0.02)]
    registry = large_registry(groups=groups)
    members = set(MANY[::50])
    for replica_id in MANY:
        registry.note(replica_id, make_report(group="new" if replica_id in members else "usual"))
    request = replace(make_request(), group="new")
    chosen = {registry.place(replace(request, request_id=str(n)), MANY).replica_id for n in range(30)}
    assert chosen <= members


def test_adapters_are_forgotten_with_their_replicas() -> None:
    registry = large_registry()
    registry.note("r001", make_report(adapters=(SQL.digest,)))
    registry.note("r001", make_report(adapters=("other",)))
    registry.note("r002", make_report(adapters=(SQL.digest,)))
    assert {key: list(known) for key, known in registry._with_adapter.items()} == {
        "other": ["r001"], SQL.digest: ["r002"],
    }  # fmt: skip
    registry.set_replicas(["r001"])
    assert list(registry._with_adapter) == ["other"]


def test_a_replica_with_other_weights_is_known_until_it_is_gone() -> None:
    registry = large_registry()
    assert not registry.some_differ_from(7)
    for replica_id in MANY:
        registry.note(replica_id, make_report(weights=7))
    assert not registry.some_differ_from(7)
    registry.note("r009", make_report(weights=8))
    assert registry.some_differ_from(7)
    registry.note("r009", make_report(weights=7))
    assert not registry.some_differ_from(7)
    registry.note("r009", make_report(weights=8))
    registry.set_replicas(["r001", "r002"])
    assert not registry.some_differ_from(7)
