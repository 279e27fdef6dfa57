"""What the launcher says of models that start, by what Serve and the replicas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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

from deployments.launcher.rollout import READY, SERVICE, _doing
from deployments.serve.settings import ServeFile, read_serve_file

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


@pytest.mark.parametrize(
    ("replica", "told", "said"),
    [
        (deployment("UPDATING", STARTING=2), [], "starting"),
        (deployment("UPDATING", STARTING=2), ["importing torch"] * 2, "importing torch"),
        (deployment("UPDATING", SLOW, STARTING=2), ["importing torch"], "importing torch"),
        (
            deployment("UPDATING", RUNNING=1, STARTING=1),
            ["joining the service", "loading the weights"],
            "1 of 2 replicas are ready; joining the service; loading the weights",
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


def test_nothing_is_ready_before_serve_has_built_the_application(config: ServeFile) -> None:
    assert _doing(config, ServeStatus(), {}) == {"demo": "starting", SERVICE: "starting"}
