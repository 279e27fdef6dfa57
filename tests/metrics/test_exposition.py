"""The text of /metrics, read by Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.engine.adapter_store import AdapterStats
from app.engine.histogram import SECONDS, Histogram
from app.engine.stats import ChosenBackend, SleepState, SleepStats, StoreStats
from app.metrics import (
    CallMetrics,
    EngineReport,
    LoopSnapshot,
    ReplicaMetrics,
    RequestMetrics,
    Scrape,
    decoded,
    encoded,
    exposition,
    replica_metrics,
)
from app.metrics.exposition import _ADAPTERS, _LOOP, _LOOPS, _REPLICA, _REPLICAS, _SLEEP, _STORES, _TUNING, _Families
from app.metrics.families import metrics_of
from app.metrics.reports import counts_of
from tests.kit.engine import FakeClock, TimedRunner, build_fake_engine, make_request

# What tools outside look for, by family: the type, and the labels beside `model_name`.
VLLM_NAMES: dict[str, tuple[str, set[str]]] = {
    "num_requests_waiting": ("gauge", set()),
    "num_requests_running": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "gpu_cache_usage_perc": ("gauge", set()),
    "cache_config_info": ("gauge", {"block_size", "num_gpu_blocks"}),
    "lora_requests_info": ("gauge", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
    "e2e_request_latency_seconds": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "prompt_tokens": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
    "num_preemptions": ("counter", set()),
    "admission_rejections": ("counter", {"reason"}),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "prefix_cache_hits": ("counter", set()),
    "prefix_cache_queries": ("counter", set()),
}


def report(replica_id: str, num_requests: int, **engine: Any) -> EngineReport:
    """Of an engine in the middle of that many requests."""
    fake = build_fake_engine(**engine)
    for _ in range(num_requests):
        fake.add(make_request(max_tokens=5))
    for _ in range(2):
        fake.step()
    return EngineReport(replica_id=replica_id, stats=fake.stats(), measurements=fake.measurements())


def sent(*reports: EngineReport, model: str = "demo") -> list[ReplicaMetrics]:
    """What replicas with these reports send, as it comes at an ingress."""
    return [decoded(encoded(replica_metrics(model, each, {}))) for each in reports]


def after_one_request() -> Scrape:
    metrics = RequestMetrics(["demo"])
    with CallMetrics(metrics.model("demo"), [3], arrived_at=metrics.clock()) as call:
        call.tokens(0, 2)
        call.finished(0, "stop")
    return Scrape(requests=[metrics.snapshot()], replicas={"demo": sent(report("a", 1))})


def parsed(text: bytes) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text.decode()))
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families), "a family appears twice"
    return by_name


def value(text: bytes, sample_name: str, **labels: str) -> float:
    """The one sample of that name that has these labels."""
    [found] = [
        sample.value
        for family in parsed(text).values()
        for sample in family.samples
        if sample.name == sample_name and labels.items() <= sample.labels.items()
    ]
    return float(found)


@pytest.mark.parametrize("name", VLLM_NAMES)
def test_every_name_that_tools_look_for_is_there_after_one_request(name: str) -> None:
    scrape = after_one_request()
    scrape.requests[0]["demo"].refused["overloaded"] = 1  # type: ignore[index]
    families = parsed(exposition(scrape))
    kind, labels = VLLM_NAMES[name]
    family = families[f"vllm:{name}"]
    assert family.type == kind
    assert family.samples
    for sample in family.samples:
        assert sample.labels.keys() - {"le"} == {"model_name", *labels}


def test_no_series_appears_twice_and_every_counter_says_total() -> None:
    text = exposition(after_one_request())
    series = [line.rpartition(" ")[0] for line in text.decode().splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    counters = [family for family in parsed(text).values() if family.type == "counter"]
    assert counters
    assert all(sample.name.endswith("_total") for family in counters for sample in family.samples)


def test_adapters_are_named_as_gateways_look_for_them() -> None:
    def told(*several: AdapterStats | None) -> dict[str, str]:
        reports = [report(f"{number}", 1) for number in range(len(several))]
        reports = [
            replace(each, measurements=replace(each.measurements, adapters=stats))
            for each, stats in zip(reports, several, strict=True)
        ]
        scrape = Scrape(requests=[RequestMetrics(["demo"]).snapshot()], replicas={"demo": sent(*reports)})
        [sample] = parsed(exposition(scrape))["vllm:lora_requests_info"].samples
        return {name: value for name, value in sample.labels.items() if name != "model_name"}

    first = AdapterStats(("1", "2"), 3, 8, ("sql", "chat"), ("poem",))
    second = AdapterStats(("1",), 1, 8, ("sql",), ("law", "poem"))
    assert told(first, second, None) == {
        "max_lora": "8", "running_lora_adapters": "chat,sql", "waiting_lora_adapters": "law,poem"
    }  # fmt: skip
    assert told(None) == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_replicas_are_summed_under_vllms_names_and_told_apart_under_ours() -> None:
    reports = [report("a", 3), report("b", 12, num_blocks=16)]
    scrape = Scrape(
        requests=[RequestMetrics(["demo", "idle"]).snapshot()],
        replicas={"demo": sent(*reports)},
        ever={"demo": list(map(counts_of, reports))},
        num_missing=2,
        wanted={"demo": (4, "kv", "full")},
    )
    text = exposition(scrape)
    running = [each.stats.num_running for each in reports]
    free = [each.stats.num_free_blocks for each in reports]
    assert value(text, "vllm:num_requests_running", model_name="demo") == sum(running)
    assert value(text, "vllm:num_requests_waiting", model_name="demo") == 15 - sum(running) > 0
    assert value(text, "vllm:kv_cache_usage_perc", model_name="demo") == pytest.approx(1 - sum(free) / 80)
    assert [value(text, "carousel_slots_used", replica=replica) for replica in "ab"] == running
    assert [value(text, "carousel_slots", replica=replica) for replica in "ab"] == [8, 8]
    assert value(text, "vllm:iteration_tokens_total_count", model_name="demo") == 4
    assert value(text, "carousel_scrape_missing") == 2
    assert value(text, "carousel_replicas_wanted", model_name="demo", reason="kv") == 4
    assert value(text, "vllm:num_requests_running", model_name="idle") == 0  # no replica at all
    assert value(text, "vllm:kv_cache_usage_perc", model_name="idle") == 0


def test_what_a_replica_has_counted_stays_in_the_sum_when_it_goes() -> None:
    here, gone = report("a", 3), report("b", 2)
    requests = [RequestMetrics(["demo"]).snapshot()]
    ever = {"demo": [counts_of(here), counts_of(gone)]}
    both = exposition(Scrape(requests=requests, replicas={"demo": sent(here, gone)}, ever=ever))
    one = exposition(Scrape(requests=requests, replicas={"demo": sent(here)}, ever=ever))
    for name in ("vllm:prefix_cache_queries_total", "vllm:iteration_tokens_total_sum", "vllm:num_preemptions_total"):
        assert value(one, name) == value(both, name)
    assert value(one, "vllm:prefix_cache_queries_total") == 5 * 3
    assert (value(both, "vllm:num_requests_running"), value(one, "vllm:num_requests_running")) == (5, 3)
    assert b'replica="b"' not in one


def test_what_an_ingress_has_counted_stays_in_the_sum_when_it_goes() -> None:
    here, gone = (RequestMetrics(["demo"]) for _ in range(2))
    for each in (here, gone):
        each.model("demo").resumed("silent")
        CallMetrics(each.model("demo"), [3], arrived_at=0.0).__enter__()
    snapshots = [each.snapshot() for each in (here, gone)]
    both = exposition(Scrape(requests=snapshots, replicas={}))
    one = exposition(Scrape(requests=snapshots[:1], gone_requests=snapshots[1:], replicas={}))
    assert (value(both, "carousel_requests_in_flight"), value(one, "carousel_requests_in_flight")) == (2, 1)
    assert value(both, "carousel_resumes_total", reason="silent") == 2
    assert value(one, "carousel_resumes_total", reason="silent") == 2


def test_a_histogram_counts_upwards_to_all_of_its_values() -> None:
    text = exposition(after_one_request())
    counts = [
        sample.value for sample in parsed(text)["vllm:request_prompt_tokens"].samples if sample.name.endswith("_bucket")
    ]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 1)
    assert value(text, "vllm:request_prompt_tokens_sum") == 3


def test_calls_without_a_model_are_counted_without_one() -> None:
    metrics = RequestMetrics()
    metrics.model("").refused(ValueError())
    text = exposition(Scrape(requests=[metrics.snapshot()], replicas={}))
    assert value(text, "carousel_calls_refused_total", model_name="", reason="internal") == 1


def test_batches_and_webhooks_are_told_of_where_there_are_any() -> None:
    scrape = after_one_request()
    assert not any("webhook" in name or "batch_lines" in name for name in parsed(exposition(scrape)))
    counts = {
        "num_lines_completed": 5,
        "num_lines_failed": 1,
        "num_webhook_attempts": 4,
        "num_webhooks_delivered": 2,
        "num_webhooks_given_up": 1,
        "num_webhooks_pending": 3,
        "num_paused": 2,
    }
    text = exposition(replace(scrape, batches=counts))
    names = ("batch_lines_completed_total", "batch_lines_failed_total", "webhook_attempts_total")
    names += ("webhooks_delivered_total", "webhooks_given_up_total", "webhooks_pending", "batches_paused")
    assert [value(text, f"carousel_{name}") for name in names] == [5, 1, 4, 2, 1, 3, 2]


def test_each_event_loop_has_its_delays_and_its_queue() -> None:
    delays = Histogram(SECONDS)
    delays.observe(0.001)
    delays.observe(0.4)
    loop = LoopSnapshot(
        delay_s=delays.snapshot(), num_stalls=1, stalled_s=0.4, num_tasks=9, queued={"default": 7, "bodies": 2}
    )
    of_replica = replace(report("r1", 1), loop=replace(loop, queued={"default": 0}))
    text = exposition(Scrape(requests=[], replicas={"demo": sent(of_replica)}, loops={("ingress", "i1"): loop}))
    assert value(text, "carousel_thread_queue", process="ingress", id="i1", threads="bodies") == 2
    assert value(text, "carousel_ingresses") == 1
    for process, name, num_queued in (("ingress", "i1", 7), ("replica", "r1", 0)):
        labels = {"process": process, "id": name}
        assert value(text, "carousel_loop_stalls_total", **labels) == 1
        assert value(text, "carousel_loop_stalled_seconds_total", **labels) == 0.4
        assert value(text, "carousel_loop_tasks", **labels) == 9
        assert value(text, "carousel_thread_queue", threads="default", **labels) == num_queued
        assert value(text, "carousel_loop_delay_seconds_bucket", le="0.05", **labels) == 1
        assert value(text, "carousel_loop_delay_seconds_count", **labels) == 2


def test_the_limits_that_a_tuner_moves_are_there_with_the_reason_and_only_where_there_are_targets() -> None:
    clock = FakeClock()
    tuned = report("a", 1, runner=TimedRunner(clock, step_s=1.5), clock=clock, targets={"itl_p99_ms": 100})
    text = exposition(Scrape(requests=[], replicas={"demo": sent(tuned, report("b", 1))}))
    assert value(text, "carousel_limit", replica="a", limit="prefill_chunk_tokens") == 16
    assert value(text, "carousel_limits_info", replica="a") == 1
    assert value(text, "carousel_target_p99_seconds", replica="a", target="itl_p99") == pytest.approx(1.5, rel=0.03)
    assert value(text, "carousel_targets_missed", replica="a") == 0
    assert {sample.labels["replica"] for sample in parsed(text)["carousel_limit_changes"].samples} == {"a"}


def test_a_replica_that_sleeps_says_so() -> None:
    slept = report("a", 0)
    sleep = SleepStats(state=SleepState.ASLEEP, num_wakes=2, waking_s=1.5, queued_s=0.5, num_turns_ended=1)
    slept = replace(slept, measurements=replace(slept.measurements, sleep=sleep))
    families = parsed(exposition(Scrape(requests=[], replicas={"demo": sent(slept)})))
    in_state = {each.labels["state"]: each.value for each in families["carousel_sleep_state"].samples}
    assert in_state == {"awake": 0, "asleep": 1, "queued": 0, "waking": 0}
    names = ("carousel_wakes", "carousel_waking_seconds", "carousel_device_queue_seconds", "carousel_turns_ended")
    assert [families[name].samples[0].value for name in names] == [2, 1.5, 0.5, 1]


def of_every_kind(replica_id: str) -> EngineReport:
    """With samples in every table of replicas, and with labels that have to be escaped."""
    clock = FakeClock()
    tuned = report(replica_id, 3, runner=TimedRunner(clock, step_s=0.7), clock=clock, targets={"itl_p99_ms": 100})
    delays = Histogram(SECONDS)
    delays.observe(0.3)
    measurements = replace(
        tuned.measurements,
        adapters=AdapterStats(("1",), 3, 8, ("sql",), ("law",)),
        backend=ChosenBackend('a "graph"\\', {"faster": "no"}),
        sleep=SleepStats(waking_s=1 / 3, num_wakes=10**9),
        store=StoreStats(num_fetched_tokens=5, block_bytes=10**15, num_read=7),
    )
    loop = LoopSnapshot(delay_s=delays.snapshot(), num_stalls=1, stalled_s=0.1, num_tasks=9, queued={"default": 7})
    return replace(tuned, measurements=measurements, loop=loop, group='bo"ld\nß')


def test_the_lines_that_replicas_write_are_those_of_prometheus_client() -> None:
    model = 'a "model"\\ of\ntwo lines'
    reports = [of_every_kind(name) for name in ("r1", 'r"2\\')] + [report("plain", 1)]
    text = exposition(Scrape(requests=[], replicas={model: sent(*reports, model=model)}))
    rows = [((model, each.replica_id, each.group), each) for each in reports]
    loops = [(("replica", each.replica_id), each.loop) for each in reports if each.loop is not None]
    parts = {name: [(labels, getattr(each.measurements, name)) for labels, each in rows[:2]] for name in PARTS}
    families = [
        *metrics_of(_REPLICAS, _REPLICA, rows),
        *(family for name, table in PARTS.items() for family in metrics_of(table, _REPLICA, parts[name])),
        *metrics_of(_LOOPS, _LOOP, loops),
    ]
    expected = generate_latest(_Families(families))
    assert expected in text
    assert expected.count(b"\n") > 700
    labels = [sample.labels for sample in parsed(text)["carousel_backend"].samples]
    assert labels[1] == {"model_name": model, "replica": 'r"2\\', "group": 'bo"ld\nß', "backend": 'a "graph"\\'}


PARTS: dict[str, Any] = {"adapters": _ADAPTERS, "store": _STORES, "tuning": _TUNING, "sleep": _SLEEP}


def test_every_family_is_declared_once_however_many_replicas_there_are() -> None:
    scrape = Scrape(requests=[], replicas={"demo": sent(*(of_every_kind(str(number)) for number in range(5)))})
    heads = [line for line in exposition(scrape).splitlines() if line.startswith(b"# TYPE")]
    assert len(heads) == len(set(heads)) > 60


def test_lines_of_a_family_that_this_version_does_not_know_are_left_out() -> None:
    [usual] = sent(report("a", 1))
    newer = structs.replace(usual, lines=usual.lines | {"carousel_newer": b"carousel_newer{} 1.0\n"})
    assert exposition(Scrape(requests=[], replicas={"demo": [newer]})) == exposition(
        Scrape(requests=[], replicas={"demo": [usual]})
    )
