"""What each process of a service imports, and what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from deployments.launcher.supervisor import environment
from deployments.serve.settings import ServeFile

PROJECT = Path(__file__).parents[2]
CODE = """
import sys, deployments.preload, deployments.serve.replica, deployments.serve.ingress, deployments.launcher.rollout
found = {"pandas", "fastapi", "pyarrow", "torch", "transformers", "aiohttp", "fsspec", "ray.data"} & sys.modules.keys()
assert not found, found
import pandas
pandas.DataFrame()
import fastapi
from ray import serve
app = fastapi.FastAPI()
from ray.serve._private import http_util
assert isinstance(app, http_util.FastAPI) and isinstance(fastapi.APIRouter(), serve.api.APIRouter)
assert not isinstance(app, http_util.APIRoute) and not isinstance(deployments, http_util.FastAPI)
assert http_util.jsonable_encoder({1}) == [1]
import uvicorn
assert "deployments.serve.http_server" not in sys.modules
config = uvicorn.Config(app)
config.load()
assert config.http_protocol_class.__module__ == "deployments.serve.http_server"
"""


def test_the_processes_of_a_service_import_serve_without_pandas_and_fastapi() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, env=os.environ | {"PYTHONPATH": str(PROJECT)})


def test_workers_import_it_before_they_have_work(tmp_path: Path) -> None:
    file = ServeFile(host="127.0.0.1", port=1, applications={})
    module = environment(file, tmp_path, {})["RAY_preload_python_modules"]
    assert module == "deployments.preload"
    assert find_spec(module) is not None


def test_haproxy_shows_its_pages_where_the_service_listens_and_notices_silent_and_dead_clients() -> None:
    """Every address of HAProxy is that of the service, whatever the port."""
    code = "import deployments.preload, ray.serve._private.haproxy as it; print(it.HAPROXY_CONFIG_TEMPLATE)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    addresses = [line.split()[1:] for line in lines if line.split()[:1] == ["bind"]]
    hosts = [" ".join(address).partition(" }}:")[0] for address in addresses]
    assert sorted(hosts) == ["{{ config.frontend_host"] * 3 + ["{{ config.grpc_frontend_host"]
    defaults = lines[lines.index("defaults") : next(at for at, line in enumerate(lines) if line.startswith("frontend"))]
    assert "    timeout http-request 10s" in defaults
    assert "    option abortonclose" in defaults
    assert "splice-request" not in done.stdout
