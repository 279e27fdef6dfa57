"""Facts that follow from a request's fields."""

from __future__ import annotations

from itertools import combinations

from app.engine.block_store import root_name
from app.engine.prefix import root_digest
from app.engine.request import Adapter
from tests.kit.engine import make_request

DIGEST = "0123456789abcdef"
ADAPTER = Adapter(name="sql", path="/sql", digest=DIGEST)


def test_no_salt_that_a_client_can_write_shares_kv_with_requests_of_an_adapter() -> None:
    salts = ["", "mine", "\n", "\nmine", DIGEST, f"{DIGEST}\n", f"{DIGEST}\nmine", f"\n{DIGEST}\n", f"{DIGEST}\n\n"]
    requests = [make_request(cache_salt=salt, adapter=adapter) for salt in salts for adapter in (None, ADAPTER)]
    for first, second in combinations((request.prefix_salt for request in requests), 2):
        assert first != second
        assert root_digest(first) != root_digest(second), "for the choice of a replica"
        assert root_name(b"model", first) != root_name(b"model", second), "in folders and between replicas"
