"""The cluster file of the project, against Ray's own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from app.batches import MAX_REQUEST_BYTES

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROJECT / "cluster.yaml").read_text())
    return loaded


def test_it_is_valid_for_the_cluster_launcher(config: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_starts_ray_in_serves_fast_modes(config: dict[str, Any], commands: str) -> None:
    start = next(command for command in config[commands] if "ray start" in command)
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_HA_PROXY=1" in start
    assert "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=3600" in start, "else streams end 120 s after ingresses change"
    assert f"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH={2 * MAX_REQUEST_BYTES}" in start, "else some bodies are refused"
    assert "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1 " in start, "else nothing listens for 30 s after HAProxy dies"
    assert start.index("RAY_SERVE_") < start.index("ray start")


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_every_node_wants_the_token_of_the_cluster(config: dict[str, Any], commands: str) -> None:
    """Without one, any process that reaches Ray's ports runs code there."""
    start = next(command for command in config[commands] if "ray start" in command)
    assert "RAY_AUTH_MODE=token" in start[: start.index("ray start")]
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
