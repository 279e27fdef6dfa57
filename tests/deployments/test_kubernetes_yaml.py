"""The manifest for Kubernetes: well formed for KubeRay, valid for Serve and us, at one with the other configs."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.serve.settings import BATCHES_CPUS, INGRESS_CPUS, read_serve_file
from tests.kit.service import entry

PROJECT = Path(__file__).parents[2]
Json = dict[str, Any]


def exactly(**properties: Any) -> Json:
    """An object with these fields and no others; a name that ends in `_` may be left out."""
    named = {name.rstrip("_"): value for name, value in properties.items()}
    required = [name for name in properties if not name.endswith("_")]
    return {"type": "object", "properties": named, "required": required, "additionalProperties": False}


def many(items: Json) -> Json:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
CONTAINER = exactly(
    name=TEXT, image=TEXT, env=many(exactly(name=TEXT, value={"type": "string"})),
    ports=many(exactly(name={"type": "string", "pattern": "^[a-z0-9-]{1,15}$"}, containerPort=NUMBER)),
    resources=exactly(requests=TEXTS, limits=TEXTS),
    volumeMounts=many(exactly(name=TEXT, mountPath={"type": "string", "pattern": "^/"}, readOnly_={"type": "boolean"})),
    readinessProbe_=exactly(
        httpGet=exactly(path=TEXT, port=NUMBER), periodSeconds=NUMBER, timeoutSeconds=NUMBER, failureThreshold=NUMBER
    ),
)  # fmt: skip
VOLUME = exactly(
    name=TEXT, secret_=exactly(secretName=TEXT), persistentVolumeClaim_=exactly(claimName=TEXT)
) | {"minProperties": 2, "maxProperties": 2}  # fmt: skip
TEMPLATE = exactly(
    metadata=exactly(labels=TEXTS),
    spec=exactly(containers=many(CONTAINER), volumes=many(VOLUME), automountServiceAccountToken={"const": False}),
)
# The part of KubeRay's definition of `ray.io/v1` (its API reference) that the manifest uses.
RAY_SERVICE = exactly(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=exactly(name=TEXT),
    spec=exactly(
        serveConfigV2=TEXT,
        rayClusterConfig=exactly(
            rayVersion=TEXT,
            authOptions=exactly(mode={"enum": ["token", "disabled"]}),
            gcsFaultToleranceOptions=exactly(
                redisAddress=TEXT,
                redisPassword=exactly(valueFrom=exactly(secretKeyRef=exactly(name=TEXT, key=TEXT))),
            ),
            headGroupSpec=exactly(rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs=many(
                exactly(
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)


@pytest.fixture(scope="module")
def documents() -> dict[str, Json]:
    """By kind."""
    loaded = list(yaml.safe_load_all((PROJECT / "deployments" / "kubernetes.yaml").read_text()))
    return {document["kind"]: document for document in loaded}


@pytest.fixture(scope="module")
def cluster_config(documents: dict[str, Json]) -> Json:
    return dict(documents["RayService"]["spec"]["rayClusterConfig"])


@pytest.fixture(scope="module")
def serve_config(documents: dict[str, Json]) -> Json:
    return dict(yaml.safe_load(documents["RayService"]["spec"]["serveConfigV2"]))


def templates(cluster_config: Json) -> list[Json]:
    groups = [cluster_config["headGroupSpec"], *cluster_config["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def containers(cluster_config: Json) -> list[Json]:
    return [container for each in templates(cluster_config) for container in each["spec"]["containers"]]


def test_it_has_the_form_that_kuberay_defines(documents: dict[str, Json]) -> None:
    jsonschema.validate(documents["RayService"], RAY_SERVICE)
    assert documents.keys() == {"RayService", "PodDisruptionBudget", "PersistentVolumeClaim", "NetworkPolicy"}


def test_its_serve_config_is_valid_for_us_and_for_serve(serve_config: Json, tmp_path: Path) -> None:
    ServeDeploySchema.model_validate(serve_config)
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([entry()]))
    (tmp_path / "serve.yaml").write_text(
        yaml.safe_dump(serve_config).replace("/etc/carousel/keys.yaml", str(tmp_path / "keys.yaml"))
    )
    file = read_serve_file(tmp_path / "serve.yaml")
    assert (file.host, file.port) == ("0.0.0.0", 8000)
    assert not file.applications["carousel"].api.allow_unauthenticated


def test_it_serves_what_the_gpu_example_serves(serve_config: Json) -> None:
    example = yaml.safe_load((PROJECT / "deployments" / "serve_gpu.yaml").read_text())
    [ours], [theirs] = serve_config["applications"], example["applications"]
    for name in ("models", "ingress"):
        assert ours["args"][name] == theirs["args"][name]
    assert ours["import_path"] == theirs["import_path"]


def test_every_pod_starts_ray_as_the_cluster_launcher_does(cluster_config: Json) -> None:
    launcher = yaml.safe_load((PROJECT / "cluster.yaml").read_text())
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = next(command for command in launcher[commands] if "ray start" in command)
        modes = dict(re.findall(r"(RAY_\w+)=(\S+)", start.partition("ray start")[0]))
        assert "RAY_SERVE_ENABLE_HA_PROXY" in modes
        assert modes.pop("RAY_AUTH_MODE") == cluster_config["authOptions"]["mode"], "which KubeRay sets in every pod"
        for container in containers(cluster_config):
            assert {each["name"]: each["value"] for each in container["env"]} == modes


def test_the_image_and_the_version_are_those_of_our_ray(cluster_config: Json) -> None:
    assert cluster_config["rayVersion"] == ray.__version__
    assert f"ray=={ray.__version__}" in (PROJECT / "constraints.txt").read_text()
    assert {container["image"].rpartition(":")[2] for container in containers(cluster_config)} == {ray.__version__}
    assert len({container["image"] for container in containers(cluster_config)}) == 1


def test_ports_probes_and_policy_agree(documents: dict[str, Json], cluster_config: Json, serve_config: Json) -> None:
    port = serve_config["http_options"]["port"]
    for container in containers(cluster_config):
        assert {"name": "serve", "containerPort": port} in container["ports"]
    for group in cluster_config["workerGroupSpecs"]:
        for container in group["template"]["spec"]["containers"]:
            assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": port}
    policy = documents["NetworkPolicy"]["spec"]
    assert policy["ingress"][0] == {"ports": [{"port": port}]}, "the only port that is open to all"
    assert all("from" in rule for rule in policy["ingress"][1:])
    for template in templates(cluster_config):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_a_drain_takes_one_pod_at_a_time(documents: dict[str, Json], cluster_config: Json) -> None:
    budget = documents["PodDisruptionBudget"]["spec"]
    num_pods = 1 + sum(group["replicas"] for group in cluster_config["workerGroupSpecs"])
    assert budget.keys() == {"minAvailable", "selector"}
    assert budget["minAvailable"] == num_pods - 1
    for template in templates(cluster_config):
        assert budget["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_keys_come_from_a_secret_and_batches_from_a_volume_that_all_workers_share(
    documents: dict[str, Json], cluster_config: Json, serve_config: Json
) -> None:
    args = serve_config["applications"][0]["args"]
    wanted = {"keys": PurePosixPath(args["api"]["keys_file"]).parent}
    for template in templates(cluster_config):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        [container] = template["spec"]["containers"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["keys"]["secret"] == {"secretName": "carousel-keys"}
        assert PurePosixPath(mounts["keys"]["mountPath"]) == wanted["keys"]
        assert mounts["keys"]["readOnly"]
        if container["name"] == "ray-worker":
            claim = documents["PersistentVolumeClaim"]
            assert volumes["batches"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
            assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
            assert PurePosixPath(mounts["batches"]["mountPath"]) in PurePosixPath(args["batches"]["path"]).parents
    text = (PROJECT / "deployments" / "kubernetes.yaml").read_text()
    assert not re.search(r"[0-9a-f]{64}|whsec_|sk-", text), "no key and no hash of one is in the manifest"


def test_the_workers_have_room_for_all_deployments(cluster_config: Json, serve_config: Json) -> None:
    args = serve_config["applications"][0]["args"]
    [group] = cluster_config["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    [model] = args["models"]
    assert model["replicas"]["num_replicas"] * model["replicas"]["num_gpus"] <= group["minReplicas"] * int(
        limits["nvidia.com/gpu"]
    )
    num_cpus = (
        model["replicas"]["num_replicas"] * model["replicas"]["num_cpus"]
        + (args["ingress"]["num_replicas"] + 1) * INGRESS_CPUS  # an update starts one more
        + BATCHES_CPUS
    )
    assert num_cpus <= group["minReplicas"] * int(limits["cpu"])
    assert cluster_config["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
