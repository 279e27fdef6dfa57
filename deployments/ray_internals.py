"""Everything that depends on Ray's private names, for Ray 2.60: the one file to read when Ray changes.

Each entry says what Ray does, why that is changed or used, and the upstream issue if there is a known one. Nothing else
in `deployments` imports a private module of Ray, patches Ray or calls a private name of it, but
`launcher/own_cluster.py`, which starts Ray while Serve is still being imported.
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
    """Bind the port that Serve is about to open in this process to 127.0.0.1 if the node has that address.

    Every Serve replica opens a gRPC port for the calls of other deployments. Ray binds it to all interfaces and
    unpickles what arrives: a machine that reaches the port can run code. Ray has no setting for the address
    (https://github.com/ray-project/ray/issues/64544 is about the port).

    Call it in a deployment's constructor: Serve opens the port after it.
    """
    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return  # other nodes must reach it
    open_port: Callable[[Any, str], int] | None = getattr(serve_replica, "add_port_to_grpc_server", None)
    if open_port is None:
        logger.warning("this version of Ray opens its port for calls in another way; it may be on all interfaces")
        return
    if getattr(open_port, "is_on_loopback", False):
        return

    all_interfaces = "[::]:"

    def open_on_loopback(server: Any, address: str) -> int:
        return open_port(server, address.replace(all_interfaces, "127.0.0.1:"))

    open_on_loopback.is_on_loopback = True  # type: ignore[attr-defined]
    serve_replica.add_port_to_grpc_server = open_on_loopback


def max_call_bytes() -> int:
    """The most bytes that one call between deployments carries: 4 MiB unless the environment of Ray says otherwise."""
    return int(RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH)


def keep_pages_with_the_service() -> None:
    """Have HAProxy show its statistics and metrics where the service listens, not on all interfaces.

    Ray's template has the addresses `*:` and `:`, and no setting for them. No upstream issue is known. Call it before
    Serve's HAProxyManager is imported in this process.
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
    """Have HAProxy answer 408 to a client that has not sent the head of a request after ten seconds, and hang up.

    Ray's template has the line for it (`timeout http-request`), its setting no variable: a client that sends nothing
    keeps its connection for an hour, and when all connections are such, others wait as long. Bodies and answers take
    their time as before. No upstream issue is known. Call it before Serve's HAProxyManager is imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    setting = "config.timeout_http_request_s"
    unset = f"{{% if {setting} is not none %}}timeout http-request {{{{ {setting} }}}}s{{% endif %}}"
    head_timeout_s = 10
    if unset not in template:
        logger.warning("this version of Ray configures HAProxy in another way; silent connections may be kept long")
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template.replace(unset, f"timeout http-request {head_timeout_s}s")


def copy_request_bodies() -> None:
    """Have HAProxy copy the bodies of requests and not splice them in the kernel.

    Ray's template splices (`option splice-request`), and has no setting for it. HAProxy 2.8.25 does not notice then
    that a client has died which waits for an answer, if its request was not the first on its connection and had a body
    of more than a buffer, 16 KiB: the request runs to its end, the connection stays in CLOSE-WAIT, and HAProxy
    computes without a pause meanwhile. No upstream issue is known. Call it before Serve's HAProxyManager is imported
    in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template.replace("    option splice-request\n", "")


def answer_as_the_api() -> None:
    """Have HAProxy answer as our API does where no ingress answers: 503 and `Retry-After`, so that clients try again.

    Ray's template answers 500 as plain text when an ingress closes a connection without an answer, or none takes one,
    and 404 while no application is known. Serve's own proxy, which stands in while HAProxy knows of no ingress, answers
    404 and 5xx as plain text, too. There is no setting for them. No upstream issue is known. Call it before Serve's
    HAProxyManager is imported in this process.
    """
    template: str = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    frontend, default = "frontend http_frontend\n", "backend default_backend\n"
    pairs = {f"errorfile {status} {{{{ config.error_file_path }}}}\n": _error_of(status) for status in (502, 503, 504)}
    pairs |= {frontend: frontend + _ERRORS_OF_THE_API, default: default + _ERROR_WITHOUT_APPLICATIONS}
    for text, ours in pairs.items():
        if text not in template:
            logger.warning("this version of Ray configures HAProxy in another way; its errors may be plain text")
        template = template.replace(text, ours)
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template


def _error_of(status: int) -> str:
    return (
        f'http-error status {status} content-type application/json lf-string "%[var(txn.unavailable)]" '
        "hdr Retry-After 2 hdr retry-after-ms 2000\n"
    )


_LOST = "the service has no process for this request now, or has lost the one that had it; try again"
# Bodies as `app.api.http.errors.error_body` makes them of `Unavailable`; a test compares them.
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
    """Let Serve read headers of any bytes in this process. Call it in the constructor of the HTTP deployment.

    HTTP allows header values that are not UTF-8. Ray decodes some headers as UTF-8 (`x-session-id`, `x-request-id` and
    others) before any code of an application runs, and answers 500 when it cannot. There is no setting for it, so they
    are rewritten as UTF-8 here. No upstream issue is known.
    """
    answer: AnswerRequest | None = getattr(serve_replica.Replica, "_direct_ingress_asgi", None)
    if answer is None:
        logger.warning(
            "this version of Ray takes HTTP in another way; headers that are not UTF-8 may be answered by 500"
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
    """Keep Serve from giving ids to requests in this process. Call it in the constructor of the HTTP deployment.

    Serve's middleware adds an `x-request-id` to requests without one, and to every answer. Our API has an id for each
    request itself: the header would come twice, and the field `request_id` of a body would never count. There is no
    setting for it. No upstream issue is known.
    """
    middleware = getattr(http_util, "RequestIdMiddleware", None)
    if middleware is None:
        logger.warning("this version of Ray gives ids to requests in another way; answers may have two of them")
        return

    async def pass_on(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    middleware.__call__ = pass_on


def use_own_protocol() -> None:
    """Have the HTTP servers that Serve starts in this process speak as `deployments.serve.http_server.Protocol` does.

    Those are the server of an ingress, and that of Serve's own proxy, to which HAProxy sends requests while it does not
    know of an ingress. Serve has no setting for it. Call it in the constructor of the HTTP deployment, too: not every
    cluster preloads modules.
    """
    HTTP_PROTOCOLS["auto"] = "deployments.serve.http_server:Protocol"


def headers_as_utf8(headers: Headers) -> Headers:
    """The same headers, all of them UTF-8; usually the same list. Other bytes are read as Latin-1, as HTTP does."""
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
    """Start Serve and deploy a config file's content, as `serve run --non-blocking` does, returning once proxies serve.

    `serve run` waits for the proxies before it deploys. Here the application is built, and its replicas start, while
    the proxies start. No upstream issue is known.
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
    """The address on which Serve listens for HTTP. Serve has no public way to ask for it inside a deployment."""
    return str(_get_global_client().http_config.host)


def route_in_this_loop(handle: DeploymentHandle) -> None:
    """Have the router of an unused handle run in the event loop that runs now.

    By default Serve runs it in a thread of its own, or not, by the mode that it is started in; a router that shares
    unlocked state with this loop must run in it. `_init` is how Serve's own code chooses.
    """
    handle._init(_run_router_in_separate_loop=False)


async def begin_call_on_all_replicas(handle: DeploymentHandle, method: str, *arguments: object) -> Sequence[Any]:
    """One call to each replica of a deployment, with `get_async` for its result.

    The public `results_async` of a broadcast gives no result at all when one replica hangs.
    """
    calls: Sequence[Any] = await handle.broadcast(method, *arguments)._fetch_replica_results_async()
    return calls


class RefusingRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """A RequestRouter that may refuse a call by an error in its future.

    Serve keeps such a call in its lists of calls that wait. No upstream issue is known.
    """

    @property
    def deployment(self) -> str:
        """The name of the deployment that this router routes to."""
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
    """A deployment whose `stop` Serve calls when it stops a replica, and waits for.

    Serve calls `__del__` and awaits what it gives, for at most the deployment's graceful_shutdown_timeout_s; it has no
    public hook. Python calls `__del__`, too, and awaits nothing, so `stop` gives a coroutine only where there is
    something to wait for.
    """

    def stop(self) -> Coroutine[Any, Any, None] | None:
        """End what runs here. Also called when the constructor has failed."""

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        return self.stop()
