"""The messages about mistakes in the Serve config."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import SchedulerConfig, StaticConfig, names_of
from app.errors import InvalidSetup
from app.fleet.dispatch import DECODE, PREFILL, Candidate, RequestSize, group_of_rank, make_policy
from deployments.serve.settings import (
    apply_override,
    groups_of,
    max_ingress_requests,
    parse,
    read_serve_file,
    requested_threads,
)

SIZE = RequestSize(num_prompt_tokens=1, num_expected_tokens=1)
DEPLOYMENTS = Path(__file__).parents[3] / "deployments"


def message_for(**model: Any) -> str:
    with pytest.raises(InvalidSetup) as caught:
        parse({"models": [model]})
    return caught.value.message


@pytest.mark.parametrize("name", ["serve.yaml", "serve_gpu.yaml"])
def test_the_reviewed_configs_are_valid_for_us_and_for_serve(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = read_serve_file(DEPLOYMENTS / name)
    assert config.applications["carousel"].models
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    ServeDeploySchema.model_validate(yaml.safe_load((DEPLOYMENTS / name).read_text()))


def test_a_value_out_of_range_is_named_with_its_path_and_the_limit() -> None:
    message = message_for(engine={"scheduler": {"max_running": 0}})
    assert message == "models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1"


def test_every_mistake_has_its_own_line() -> None:
    message = message_for(engine={"scheduler": {"max_running": 0, "strategy": "magic"}}, replicas={"num_cpus": "two"})
    assert message.splitlines() == [
        "models[0].engine.scheduler.strategy: got 'magic'; must be one of static, dynamic, bucketed, "
        "sorted, adaptive, continuous, hybrid",
        "models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1",
        "models[0].replicas.num_cpus: got 'two'; must be a valid number, unable to parse string as a number",
    ]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"strategy": {"name": "static", "max_wait_ms": -1}}, "strategy.max_wait_ms: got -1; must be greater than"),
        ({"strategy": {"name": "static", "size": 1}}, "strategy: static has no parameter 'size'; it has max_wait_ms"),
        ({"strategy": {"max_wait_ms": 1}}, "strategy: got {'max_wait_ms': 1} without a name; must be one of static"),
        ({"policy": ["fair"]}, "policy: got ['fair']; must be"),
        (
            {"policy": {"name": ["fair"]}},
            f"policy: got ['fair']; must be one of {', '.join(names_of(SchedulerConfig.model_fields['policy']))}",
        ),
    ],
)
def test_a_mistake_in_a_strategy_or_policy_is_told_with_what_there_is(scheduler: dict[str, Any], message: str) -> None:
    assert message_for(engine={"scheduler": scheduler}).startswith(f"models[0].engine.scheduler.{message}")


def test_a_misspelt_setting_is_named_with_the_right_spelling() -> None:
    message = message_for(engine={"scheduler": {"max_runing": 4}})
    assert message == "models[0].engine.scheduler.max_runing: no such setting; did you mean 'max_running'?"


def test_an_invented_setting_is_answered_with_those_that_exist() -> None:
    assert (
        message_for(zzz=1)
        == "models[0].zzz: no such setting; use one of name, aliases, tool_parser, pooling, deadline_s, adapters, "
        "prices, engine, replicas"
    )


def test_two_settings_that_contradict_each_other_are_explained() -> None:
    message = message_for(engine={"scheduler": {"max_running": 64, "max_step_tokens": 32}})
    assert message.startswith("models[0].engine.scheduler: max_step_tokens=32 is below max_running=64")


@pytest.mark.parametrize(
    ("autoscaling", "message"),
    [
        ({"max_replica": 3}, ".max_replica: no such setting; did you mean 'max_replicas'?"),
        ({"min_replicas": -1}, ".min_replicas: got -1; must be greater than or equal to 0"),
        ({"target_s": 0}, ".target_s: got 0; must be greater than 0"),
        ({"target_s": -1.5}, ".target_s: got -1.5; must be greater than 0"),
        (
            {"target_s": 2.0, "target_tokens": 512},
            ".target_tokens: this setting was removed; leave it out, or set target_s, the seconds of work per replica: "
            "divide the tokens by a replica's tokens_per_s in GET /admin/fleet",
        ),
        ({"min_replicas": 5, "max_replicas": 2}, ": min_replicas=5 is above max_replicas=2; lower it"),
        (True, ": got True; must be a valid dictionary or instance of AutoscalingConfig"),
    ],
)
def test_a_branch_that_may_be_left_out_is_checked_like_the_others(autoscaling: object, message: str) -> None:
    assert message_for(replicas={"autoscaling": autoscaling}) == f"models[0].replicas.autoscaling{message}"


@pytest.mark.parametrize(
    ("replicas", "first_and_most"),
    [
        ({"num_replicas": 3}, (3, 3)),
        ({"num_replicas": 3, "autoscaling": {"max_replicas": 5}}, (3, 5)),
        ({"num_replicas": 3, "autoscaling": {"max_replicas": 2}}, (2, 2)),
        ({"num_replicas": 3, "autoscaling": {"min_replicas": 4}}, (4, 4)),
        ({"num_replicas": 1, "autoscaling": {"min_replicas": 0}}, (1, 4)),
    ],
)
def test_autoscaling_begins_with_the_fixed_number_within_its_limits(
    replicas: dict[str, Any], first_and_most: tuple[int, int]
) -> None:
    [model] = parse({"models": [{"replicas": replicas}]}).models
    assert (model.replicas.initial_replicas, model.replicas.max_replicas) == first_and_most


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [("cuda", 0, "set num_gpus to 1"), ("cpu", 1, "set num_gpus to 0"), ("auto", 2, "at most 1")],
)
def test_a_device_that_the_reservation_does_not_grant_is_refused(device: str, num_gpus: int, words: str) -> None:
    message = message_for(engine={"model": {"device": device}}, replicas={"num_gpus": num_gpus})
    assert message.startswith(f"models[0].replicas.num_gpus: got {num_gpus}")
    assert words in message


@pytest.mark.parametrize(
    ("model", "replicas", "message"),
    [
        ({}, {"tensor_parallel": 0}, "replicas.tensor_parallel: got 0; must be greater than or equal to 1"),
        ({}, {"tensor_parallel": 2, "num_gpus": 0.5}, "replicas.num_gpus: got 0.5 with tensor_parallel 2; each rank"),
        ({"simulated": {}}, {"tensor_parallel": 2}, "replicas.tensor_parallel: got 2; a simulated model"),
        ({}, {"num_gpus": 4}, "replicas.num_gpus: got 4; it must be at most 1. For 4 GPUs per replica, set num_gpus"),
    ],
)
def test_ranks_without_a_device_of_their_own_are_refused(
    model: dict[str, Any], replicas: dict[str, Any], message: str
) -> None:
    assert message_for(engine={"model": model}, replicas=replicas).startswith(f"models[0].{message}")


def test_a_replica_of_several_ranks_reserves_as_much_for_each() -> None:
    args = {"models": [{"replicas": {"num_replicas": 1, "num_cpus": 2, "num_gpus": 1, "tensor_parallel": 4}}]}
    config = parse(args)
    [model] = config.models
    assert (model.replicas.reserved_cpus, model.replicas.reserved_gpus) == (8, 4)
    assert requested_threads(config)[:4] == [None] * 4


def test_two_names_that_serve_could_not_tell_apart_are_refused() -> None:
    with pytest.raises(InvalidSetup, match=r"models\[1\].name: got 'a:b', too similar to 'a/b'"):
        parse({"models": [{"name": "a/b"}, {"name": "a:b"}]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: [", "is not valid YAML"),
        ("just text", "contains no list of `applications`"),
        ("applications: [{import_path: other:app}]", "import_path: deployments.serve.application:build"),
        (
            "http_options: {port: high}\napplications: [{import_path: 'deployments.serve.application:build'}]",
            "http_options.port: got 'high'",
        ),
        (
            "http_options: {port: 70000}\napplications: [{import_path: 'deployments.serve.application:build'}]",
            "http_options.port: got 70000; must be less than or equal to 65535",
        ),
        (
            "http_options: 5\napplications: [{import_path: 'deployments.serve.application:build'}]",
            "http_options: got 5",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(InvalidSetup) as caught:
        read_serve_file(path)
    assert words in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"nowhere.yaml: No such file"):
        read_serve_file(tmp_path / "nowhere.yaml")


DEPLOYED = SchedulerConfig(max_running=4, max_waiting=8, policy="fair")


def test_a_user_config_changes_what_it_names_and_always_means_the_same() -> None:
    config = apply_override(DEPLOYED, {"scheduler": {"strategy": {"name": "static", "max_wait_ms": 2}}})
    assert config == SchedulerConfig(max_running=4, max_waiting=8, policy="fair", strategy=StaticConfig(max_wait_ms=2))
    assert apply_override(DEPLOYED, {}) == apply_override(DEPLOYED, {"scheduler": None}) == DEPLOYED


@pytest.mark.parametrize(
    ("user_config", "message"),
    [
        ({"cache": {"memory_gib": 2}}, "user_config.cache: cannot change while a replica is running"),
        ({"model": {}}, "user_config.model: cannot change while a replica is running"),
        ({"strategy": "static"}, "user_config: must be {'scheduler': {...}}"),
        ("static", "user_config: must be {'scheduler': {...}}; got 'static'"),
        ({"scheduler": "static"}, "user_config.scheduler: got 'static'; must map names to settings"),
        ({"scheduler": {"strategy": "magic"}}, "user_config.scheduler.strategy: got 'magic'; must be one of static"),
        ({"scheduler": {"max_running": 0}}, "user_config.scheduler.max_running: got 0; must be greater than"),
        (
            {"scheduler": {"max_waiting": 9}},
            "user_config.scheduler: max_running + max_waiting is 13, but the replicas were deployed for 12",
        ),
    ],
)
def test_a_user_config_that_cannot_be_is_refused_in_words(user_config: object, message: str) -> None:
    with pytest.raises(InvalidSetup) as refused:
        apply_override(DEPLOYED, user_config)
    assert refused.value.message.startswith(message)


def test_the_user_configs_of_a_file_are_checked_before_anything_starts(tmp_path: Path) -> None:
    document = yaml.safe_load((DEPLOYMENTS / "serve.yaml").read_text())
    document["applications"][0]["deployments"] = [
        {"name": "ingress"},
        {"name": "replica-demo", "user_config": {"scheduler": {"policy": "sjf", "max_runing": 3}}},
    ]
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InvalidSetup, match=r"user_config\.scheduler\.max_runing: no such setting"):
        read_serve_file(path)


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_affinity"])
def test_every_dispatch_policy_of_the_settings_can_be_made(name: str) -> None:
    chosen = parse({"models": [{"replicas": {"dispatch": name}}]}).models[0].replicas.dispatch
    assert make_policy(chosen, random.Random(0)).decide([Candidate(replica_id="a")], SIZE).policy == name


def test_a_mistake_in_dispatch_is_answered_with_the_policies() -> None:
    assert message_for(replicas={"dispatch": "fastest"}) == (
        "models[0].replicas.dispatch: got 'fastest'; must be 'round_robin', 'least_loaded' or 'prefix_affinity'"
    )


@pytest.mark.parametrize(
    ("costs", "mistake"),
    [
        ({"step_ms": -1}, "step_ms: got -1; must be greater than or equal to 0"),
        ({"step": 1}, "step: no such setting; did you mean 'step_ms'?"),
    ],
)
def test_a_mistake_in_the_cost_model_is_found_at_start(costs: Any, mistake: str) -> None:
    assert message_for(engine={"model": {"simulated": costs}}) == f"models[0].engine.model.simulated.{mistake}"


A, B = {"name": "a"}, {"name": "b", "share": 0.25, "scheduler": {"policy": "sjf", "max_step_tokens": 256}}


def test_the_groups_of_a_trial_differ_in_what_they_name() -> None:
    model = parse({"models": [{"engine": {"scheduler": {"max_running": 16}}, "replicas": {"groups": [A, B]}}]}).models[
        0
    ]
    assert model.scheduler_of("a") == model.engine.scheduler == model.scheduler_of("")
    assert model.scheduler_of("b").policy.name == "sjf"
    assert (model.scheduler_of("b").max_step_tokens, model.scheduler_of("b").max_running) == (256, 16)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([A, A], "replicas: several groups have the same name: a; give each group its own"),
        (
            [A, B, {"name": "c"}],
            "replicas: num_replicas=2 is too low for 3 groups, because every group needs a replica",
        ),
        ([A, B | {"share": 0}], "replicas.groups[1].share: got 0; must be greater than 0"),
    ],
)
def test_a_mistake_in_groups_is_named(groups: list[dict[str, Any]], message: str) -> None:
    assert message in message_for(replicas={"groups": groups})


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (
            {"num_replicas": 2, "prefill_replicas": 2},
            "prefill_replicas=2 and num_replicas=2 leave no replica for decode",
        ),
        ({"prefill_replicas": 0}, "prefill_replicas: got 0; must be greater than or equal to 1"),
        ({"prefill_replicas": 1, "autoscaling": {}}, "requires at least 2 replicas; raise autoscaling.min_replicas"),
        (
            {"prefill_replicas": 1, "groups": [A, B]},
            "prefill_replicas and groups cannot be combined, because replicas for p",
        ),
        (
            {"prefill_replicas": 1, "tensor_parallel": 2},
            "prefill_replicas and tensor_parallel=2 cannot be combined, because r",
        ),
        (
            {"prefill_replicas": 1, "fetch_prefixes": False},
            "prefill_replicas and fetch_prefixes=false cannot be combined",
        ),
    ],
)
def test_a_mistake_in_roles_is_named(replicas: dict[str, Any], message: str) -> None:
    assert message in message_for(replicas=replicas)


def test_roles_are_groups_of_replicas() -> None:
    replicas = {"num_replicas": 4, "prefill_replicas": 1}
    model = parse({"models": [{"replicas": replicas}]}).models[0]
    groups = groups_of(model)
    assert [group_of_rank(rank, groups) for rank in range(4)] == [PREFILL, DECODE, DECODE, DECODE]
    assert model.scheduler_of(PREFILL) == model.engine.scheduler


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"policy": "magic"}, ".policy: got 'magic'; must be one of"),
        ({"max_step_tokens": 8}, ": max_step_tokens=8 is below max_running=32"),
        ({"speed": 8}, ".speed: no such setting; use one of preset, strategy"),
        ({"max_running": 0}, ".max_running: got 0; "),
        ({"max_waiting": 9999}, ": max_running + max_waiting is 10,031, but engine.scheduler allows only 288"),
    ],
)
def test_a_mistake_in_what_a_group_changes_is_named(scheduler: dict[str, Any], message: str) -> None:
    groups = [A, B | {"scheduler": scheduler}]
    assert f"replicas.groups[1].scheduler{message}" in message_for(replicas={"groups": groups})


@pytest.mark.parametrize(
    ("webhooks", "mistake"),
    [
        (
            {"url": "https://a.example/"},
            "batches.webhooks: `url` and secret_file require each other; set both or neither",
        ),
        ({"allowed_networks": ["10.0.0.1/8"]}, "batches.webhooks.allowed_networks: 10.0.0.1/8 has host bits set"),
        ({"url": "http://8.8.8.8/", "secret_file": "SECRET"}, "batches.webhooks.url: webhook.url must begin with"),
        (
            {"url": "https://a@b.example/", "secret_file": "SECRET"},
            "batches.webhooks.url: webhook.url must be a URL like",
        ),
        ({"url": "https://a.example/", "secret_file": "missing"}, "batches.webhooks.secret_file: missing: No such"),
        ({"url": "https://a.example/", "secret_file": "WRONG"}, "batches.webhooks.secret_file: webhook.secret must"),
    ],
    ids=str,
)
def test_webhooks_that_could_not_be_sent_are_told_before_anything_starts(
    tmp_path: Path, webhooks: dict[str, Any], mistake: str
) -> None:
    for name, content in (("SECRET", "whsec_" + "QUJD" * 8), ("WRONG", "canary")):
        (tmp_path / name).write_text(content)
    given = {name: str(tmp_path / value) if value in ("SECRET", "WRONG") else value for name, value in webhooks.items()
             if isinstance(value, str)}  # fmt: skip
    with pytest.raises(InvalidSetup) as caught:
        parse({"batches": {"webhooks": webhooks | given}})
    assert mistake in caught.value.message
    assert "canary" not in caught.value.message


@pytest.mark.parametrize("url", ["https://a.example/hook", "http://10.0.0.7:8080/hook", "http://hooks.internal/"])
def test_a_default_receiver_that_can_be_is_taken(tmp_path: Path, url: str) -> None:
    (tmp_path / "secret").write_text("whsec_" + "QUJD" * 8 + "\n")
    webhooks = {"url": url, "secret_file": str(tmp_path / "secret")}
    assert parse({"batches": {"webhooks": webhooks}}).batches is not None


def test_one_account_alone_can_fill_the_replicas_and_leaves_places_to_others() -> None:
    """It may have half of the places of an ingress: `SharedPool`."""
    config = parse({"models": [{"engine": {"scheduler": {"max_running": 256, "max_waiting": 1024}}}]})
    assert max_ingress_requests(config) // 2 >= 2 * (256 + 1024)
    tiny = parse({"models": [{"engine": {"scheduler": {"max_running": 1, "max_waiting": 0}}}]})
    assert max_ingress_requests(tiny) == 256
