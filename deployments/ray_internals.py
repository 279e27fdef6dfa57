"""All code that uses private names of Ray 2.60, so that changes in Ray affect only this file.

Each docstring explains Ray's behaviour and why it is changed or used, and names the upstream issue if one is known. The
only other file that uses private names is `launcher/own_cluster.py`, which starts Ray while Serve is being imported.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from ipaddress import ip_address
from typing import Any

import ray
from ray.serve._private import haproxy_templates, http_util
from ray.serve._private import replica as serve_replica
from ray.serve._private.api import _create_controller_and_proxy_refs
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.constants import HTTP_PROXY_TIMEOUT, RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH
from ray.serve.config import ControllerOptions, gRPCOptions
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema
from uvicorn.config import HTTP_PROTOCOLS

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
AnswerRequest = Callable[[Any, Any, Any, Any], Awaitable[None]]


def keep_calls_on_loopback() -> None:
    """Bind the gRPC port of this Serve replica to 127.0.0.1, if the node's address is a loopback address.

    Every Serve replica opens a gRPC port for calls from other deployments. Ray binds it to all interfaces and unpickles
    the received data, so any machine that can reach the port can run code. Ray has no setting for the address
    (https://github.com/ray-project/ray/issues/64544 is about the port).

    Must be called in a deployment's constructor, because Serve opens the port after running it.
    """
    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return  # other nodes must be able to reach the port
    open_port: Callable[[Any, str], int] | None = getattr(serve_replica, "add_port_to_grpc_server", None)
    if open_port is None:
        logger.warning("this version of Ray opens its gRPC port differently; the port may be open on all interfaces")
        return
    if getattr(open_port, "is_on_loopback", False):
        return

    all_interfaces = "[::]:"

    def open_on_loopback(server: Any, address: str) -> int:
        return open_port(server, address.replace(all_interfaces, "127.0.0.1:"))

    open_on_loopback.is_on_loopback = True  # type: ignore[attr-defined]
    serve_replica.add_port_to_grpc_server = open_on_loopback


def max_call_bytes() -> int:
    """Return the maximum size of a call between deployments: 4 MiB, unless Ray's environment variable changes it."""
    return int(RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH)


def keep_pages_with_the_service() -> None:
    """Make HAProxy serve its statistics and metrics only on the service's address, not on all interfaces.

    Ray's template binds them to `*:` and `:`, and there is no setting for it. No upstream issue is known. Must be
    called before Serve's HAProxyManager is imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    for page in ("metrics_port", "stats_port"):
        for everywhere in ("*:", ":"):
            template = template.replace(
                f"bind {everywhere}{{{{ config.{page} }}}}",
                f"bind {{{{ config.frontend_host }}}}:{{{{ config.{page} }}}}",
            )
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template


def end_silent_connections() -> None:
    """Make HAProxy respond with 408 and close the connection if a request's head does not arrive within ten seconds.

    Ray's template contains a line for this (`timeout http-request`), but no variable sets its value. A client that
    sends nothing could keep its connection for an hour, and many such clients would block all others. The timeouts for
    bodies and responses do not change. No upstream issue is known. Must be called before Serve's HAProxyManager is
    imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    setting = "config.timeout_http_request_s"
    unset = f"{{% if {setting} is not none %}}timeout http-request {{{{ {setting} }}}}s{{% endif %}}"
    head_timeout_s = 10
    if unset not in template:
        logger.warning("this version of Ray configures HAProxy differently; silent connections may stay open for long")
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template.replace(unset, f"timeout http-request {head_timeout_s}s")


def copy_request_bodies() -> None:
    """Make HAProxy copy request bodies instead of splicing them in the kernel.

    Ray's template enables splicing (`option splice-request`), and there is no setting for it. With splicing, HAProxy
    2.8.25 does not notice that a client has died while waiting for a response, if its request was not the first on the
    connection and its body exceeded a buffer of 16 KiB. The request then runs to its end, while the connection stays in
    CLOSE-WAIT and HAProxy runs in a busy loop. No upstream issue is known. Must be called before Serve's HAProxyManager
    is imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template.replace("    option splice-request\n", "")


def use_api_errors() -> None:
    """Make HAProxy respond like our API if no ingress responds: with 503 and `Retry-After`, so that clients retry.

    With Ray's template, HAProxy sends a 500 in plain text if an ingress closes a connection without a response or no
    ingress accepts it, and a 404 before the first application is deployed. Serve's own proxy, which takes over while
    HAProxy has no ingress, also sends 404 and 5xx in plain text. There is no setting for it, and no upstream issue is
    known. Must be called before Serve's HAProxyManager is imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    frontend, default = "frontend http_frontend\n", "backend default_backend\n"
    pairs = {f"errorfile {status} {{{{ config.error_file_path }}}}\n": _error_of(status) for status in (502, 503, 504)}
    pairs |= {frontend: frontend + _ERRORS_OF_THE_API, default: default + _ERROR_WITHOUT_APPLICATIONS}
    for text, ours in pairs.items():
        if text not in template:
            logger.warning("this version of Ray configures HAProxy differently; its errors may be in plain text")
        template = template.replace(text, ours)
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template


def _error_of(status: int) -> str:
    return (
        f'http-error status {status} content-type application/json lf-string "%[var(txn.unavailable)]" '
        "hdr Retry-After 2 hdr retry-after-ms 2000\n"
    )


_LOST = "no process is available to serve this request, or the process that was serving it was lost; try again"
# The bodies must equal the results of `app.api.http.errors.error_body` for `Unavailable`. A test compares them.
_ERRORS_OF_THE_API = f"""\
    http-request set-var-fmt(txn.unavailable) \
'{{"error":{{"message":"{_LOST}","type":"server_error","param":null,"code":"unavailable"}}}}'
    http-request set-var-fmt(txn.unavailable) \
'{{"type":"error","error":{{"type":"overloaded_error","message":"{_LOST}"}},"request_id":"%[uuid()]"}}' \
if {{ path_sub /v1/messages }}
    http-response return status 503 default-errorfiles \
if {{ status 404 500:504 }} {{ res.hdr(content-type) -m beg text/plain }} {{ srv_name -m beg SERVE_PROXY_ACTOR }}
    http-after-response set-status 503 reason "Service Unavailable" if {{ status 502 504 }}
"""
_ERROR_WITHOUT_APPLICATIONS = """\
    {%- if not backends %}
    http-request return status 503 default-errorfiles
    {%- endif %}
"""


def accept_odd_headers() -> None:
    """Make Serve accept any bytes in headers in this process. Must be called in the HTTP deployment's constructor.

    HTTP allows header values that are not UTF-8. Before the application's code runs, Ray decodes some headers as UTF-8
    (`x-session-id`, `x-request-id` and others), and responds with 500 if this fails. There is no setting for it, so
    this function converts all headers to UTF-8 first. No upstream issue is known.
    """
    answer: AnswerRequest | None = getattr(serve_replica.Replica, "_direct_ingress_asgi", None)
    if answer is None:
        logger.warning(
            "this version of Ray handles HTTP differently; requests with headers that are not UTF-8 may fail with 500"
        )
        return
    if getattr(answer, "accepts_odd_headers", False):
        return

    async def answer_any(replica: Any, scope: Any, receive: Any, send: Any) -> None:
        if "headers" in scope:
            scope["headers"] = headers_as_utf8(scope["headers"])
        await answer(replica, scope, receive, send)

    answer_any.accepts_odd_headers = True  # type: ignore[attr-defined]
    serve_replica.Replica._direct_ingress_asgi = answer_any


def leave_request_ids_alone() -> None:
    """Keep Serve from assigning request ids in this process. Must be called in the HTTP deployment's constructor.

    Serve's middleware adds an `x-request-id` to every response, and to requests without one. Our API assigns ids
    itself, so responses would contain the header twice, and a body's `request_id` field would always be ignored. There
    is no setting for it, and no upstream issue is known.
    """
    middleware = getattr(http_util, "RequestIdMiddleware", None)
    if middleware is None:
        logger.warning("this version of Ray assigns request ids differently; responses may contain two of them")
        return

    async def pass_on(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    middleware.__call__ = pass_on


def use_own_protocol() -> None:
    """Make the HTTP servers that Serve starts in this process use `deployments.serve.http_server.Protocol`.

    This affects the ingresses' servers and Serve's own proxy, which receives HAProxy's requests while HAProxy has no
    ingress. Serve has no setting for the protocol. Must also be called in the HTTP deployment's constructor, because
    not every cluster preloads modules.
    """
    HTTP_PROTOCOLS["auto"] = "deployments.serve.http_server:Protocol"


def headers_as_utf8(headers: Headers) -> Headers:
    """Return the headers in UTF-8. Values that are not valid UTF-8 are read as Latin-1, the encoding of HTTP."""
    if all(value.isascii() for _, value in headers):
        return headers
    return [(name, _as_utf8(value)) for name, value in headers]


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


def deploy(config: ServeDeploySchema) -> None:
    """Start Serve and deploy a config, like `serve run --non-blocking`. Blocks until the proxies are ready.

    `serve run` waits for the proxies before it deploys. With this function, the proxies and the application's replicas
    start concurrently. No upstream issue is known.
    """
    controller, starting_proxies = _create_controller_and_proxy_refs(
        http_options=config.http_options.model_dump(),
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        global_logging_config=None,
        global_tracing_config=None,
        controller_options=config.controller_options or ControllerOptions(),
        proxy_location=config.proxy_location,
    )
    client = ServeControllerClient(controller)
    _set_global_client(client)
    client.deploy_apps(config, _blocking=False)
    ray.get(starting_proxies, timeout=HTTP_PROXY_TIMEOUT)


def http_host() -> str:
    """Return the address on which Serve listens for HTTP. No public API provides it inside a deployment."""
    return str(_get_global_client().http_config.host)


def route_in_this_loop(handle: DeploymentHandle) -> None:
    """Make the router of an unused handle run in the current event loop.

    By default, it may run in a separate thread, depending on how Serve was started. A router that shares state with
    this loop without locks must run in it. Serve's own code also chooses the loop with `_init`.
    """
    handle._init(_run_router_in_separate_loop=False)


async def begin_call_on_all_replicas(handle: DeploymentHandle, method: str, *arguments: object) -> Sequence[Any]:
    """Call a method on each replica of a deployment. Returns one object per call; its `get_async` returns the result.

    A broadcast's public `results_async` returns no results at all if one replica hangs.
    """
    calls: Sequence[Any] = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    return calls


class RefusingRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """A RequestRouter whose subclasses may refuse a call by raising an error.

    Serve would never remove such a call from its lists of waiting calls. No upstream issue is known.
    """

    @property
    def deployment(self) -> str:
        """The name of the deployment whose calls are routed."""
        return str(self._deployment_id.name)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._remove_pending_request_from_indices(pending_request)
            raise


class StopsWithServe:
    """A deployment whose `stop` is called and awaited when Serve stops a replica.

    Serve has no public hook for this. It calls `__del__` and awaits the result for up to the deployment's
    graceful_shutdown_timeout_s. Python also calls `__del__` but does not await the result, so `stop` should return a
    coroutine only if there is something to wait for.
    """

    def stop(self) -> Coroutine[Any, Any, None] | None:
        """Stop this replica's work. Attributes may be missing: `stop` is also called if the constructor has failed."""

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        return self.stop()
