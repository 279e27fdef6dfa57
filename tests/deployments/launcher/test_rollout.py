"""What the launcher says of models that start, by what Serve and the replicas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ProxyStatus,
    ReplicaState,
    ServeStatus,
)

from deployments.launcher.rollout import READY, SERVICE, _doing, _schema, _welcome
from deployments.serve.settings import ServeFile, read_serve_file

UNPLACED = (
    "Deployment 'replica-demo' in application 'carousel' has 2 replicas that have taken more than 30s to be scheduled. "
    'Resources required for each replica: {"GPU": 1}'
)
SLOW = (
    "Deployment 'replica-demo' in application 'carousel' has 2 replicas that have taken more than 30s to initialize.\n"
    "This may be caused by a slow __init__ or reconfigure method."
)
FAILED = (
    "The deployment failed to start: \n\x1b[31mapp.errors.InvalidSetup\x1b[0m: x\napp.errors.InvalidSetup: no memory"
)


@pytest.fixture
def config() -> ServeFile:
    return read_serve_file(Path("deployments/serve.yaml"))


def deployment(status: str, message: str = "", **states: int) -> DeploymentStatusOverview:
    counts = {ReplicaState(name): count for name, count in states.items()}
    return DeploymentStatusOverview(DeploymentStatus(status), DeploymentStatusTrigger.UNSPECIFIED, counts, message)


def status_of(**deployments: DeploymentStatusOverview) -> ServeStatus:
    named = {name.replace("_", "-"): each for name, each in deployments.items()}
    overview = ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, named)
    return ServeStatus({"node": ProxyStatus.HEALTHY}, {"carousel": overview})


HEALTHY = deployment("HEALTHY", RUNNING=1)


@pytest.mark.parametrize(("host", "expected"), [(None, "127.0.0.1"), ("::1", "::1")])
def test_a_service_listens_on_this_machine_only_if_its_config_names_no_host(
    host: str | None, expected: str, tmp_path: Path
) -> None:
    document = yaml.safe_load(Path("deployments/serve.yaml").read_text())
    document["http_options"] = {"port": 8123} | ({} if host is None else {"host": host})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    http_options = _schema(path, read_serve_file(path)).http_options
    assert (http_options.host, http_options.port) == (expected, 8123)


@pytest.mark.parametrize(
    ("replica", "told", "said"),
    [
        (deployment("UPDATING", STARTING=2), [], "starting"),
        (deployment("UPDATING", STARTING=2), ["importing torch"] * 2, "importing torch"),
        (deployment("UPDATING", SLOW, STARTING=2), ["importing torch"], "importing torch"),
        (
            deployment("UPDATING", RUNNING=1, STARTING=1),
            ["joining the service", "loading the weights"],
            "1 of 2 replicas are ready; loading the weights",
        ),
        (deployment("UPDATING", RUNNING=1), ["joining the service"], "joining the service"),
        (deployment("UPDATING", UNPLACED, STARTING=2), [], f"starting; {UNPLACED}"),
        (
            deployment("UPDATING", "Traceback:\n  File x\nOSError: no disk", STARTING=1),
            [],
            "starting; OSError: no disk",
        ),
        (deployment("UPDATING", FAILED, STARTING=1), [], "starting; no memory"),
        (deployment("HEALTHY", RUNNING=2), ["joining the service"], READY),
    ],
)
def test_each_model_has_what_its_replicas_do(
    replica: DeploymentStatusOverview, told: list[str], said: str, config: ServeFile
) -> None:
    doing = _doing(config, status_of(replica_demo=replica, ingress=HEALTHY, batches=HEALTHY), {"demo": told})
    assert doing == {"demo": said, SERVICE: READY}


@pytest.mark.parametrize(
    ("deployments", "said"),
    [
        ({}, "starting"),
        ({"ingress": deployment("UPDATING", STARTING=1), "batches": HEALTHY}, "starting"),
        ({"ingress": HEALTHY, "batches": deployment("UPDATING", FAILED)}, "starting; no memory"),
        ({"ingress": HEALTHY, "batches": HEALTHY}, READY),
    ],
)
def test_all_other_deployments_are_one_service(deployments: dict[str, Any], said: str, config: ServeFile) -> None:
    assert _doing(config, status_of(**deployments), {}) == {"demo": "starting", SERVICE: said}


def test_models_of_two_applications_may_have_one_name(config: ServeFile) -> None:
    both = replace(config, applications=dict.fromkeys(("carousel", "other"), config.applications["carousel"]))
    doing = _doing(both, status_of(replica_demo=deployment("HEALTHY", RUNNING=1), ingress=HEALTHY), {})
    assert doing == {"carousel/demo": READY, "other/demo": "starting", SERVICE: READY}


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({}, "or, in another terminal: carousel chat\n"),
        ({"port": 8080}, "or, in another terminal: carousel chat --url http://127.0.0.1:8080\n"),
        ({"host": "0.0.0.0", "port": 8000}, "or, in another terminal: carousel chat --url http://127.0.0.1:8000\n"),
    ],
)
def test_the_welcome_names_the_address_for_a_chat(changes: dict[str, Any], hint: str, config: ServeFile) -> None:
    assert hint in _welcome(replace(config, **changes), 1.0)


def test_nothing_is_ready_before_serve_has_built_the_application(config: ServeFile) -> None:
    assert _doing(config, ServeStatus(), {}) == {"demo": "starting", SERVICE: "starting"}
