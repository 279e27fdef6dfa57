"""Where a message goes and where it never goes: the corpus of server-side request forgery, against real sockets."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from app.errors import InvalidRequest
from app.webhooks.client import DeliveryFailed, WebhookClient
from tests.unclosed import nothing_unclosed
from tests.waiting import PATIENCE_S
from tests.webhooks.receivers import LOCAL, OK, Connects, Receiver, at, message, names, status

LOOPBACK = "http://127.0.0.1"


async def failure(client: WebhookClient, url: str) -> DeliveryFailed:
    with pytest.raises(DeliveryFailed) as caught:
        await client.deliver(message(), at(url), time.time())
    return caught.value


# What every byte of a URL may be made to mean by another parser.
NO_URLS = [
    "", " ", "https://", "https:///x", "https://:443/", "example.com/x", "//example.com/x",
    "http://example.com/x", "ftp://example.com/x", "file:///etc/passwd", "gopher://example.com/x", "unix:/run/x.sock",
    "http+unix://%2frun%2fx.sock/x", "javascript:alert(1)", "data:text/plain,x", "wss://example.com/x",
    "https://user@example.com/", "https://user:pass@example.com/", "https://@example.com/", "https://example.com@127.0.0.1/",
    "https://127.0.0.1@example.com/", "https://example.com:443@127.0.0.1/", "https://example.com%40127.0.0.1/",
    "https://example.com#@127.0.0.1/", "https://127.0.0.1#@example.com/", "https://example.com/#x",
    "https://example.com\\@127.0.0.1/", "https://example.com\\.127.0.0.1/", "https:\\\\example.com/",
    "https:/example.com",
    "https://example.com/\r\nHost: 127.0.0.1", "https://example.com\r\n/x", "https://example.com/x\ny",
    "https://exam\tple.com/",
    "https://example.com/ x", " https://example.com/", "https://example.com/\0", "https://example.com /",
    "https://example.com/é", "https://exämple.com/", "https://ⓔxample.com/", "https://127。0。0。1/", "https://１２７.0.0.1/",
    "https://example.com:0/", "https://example.com:22/", "https://example.com:6379/", "https://example.com:65536/",
    "https://example.com:443443/", "https://example.com:-1/", "https://example.com:+443/", "https://example.com:0x1bb/",
    "https://example.com:443:443/", "https://example.com:/x:", "https://exa mple.com/", "https://-example.com/",
    "https://example-.com/", "https://.example.com/", "https://example..com/", "https://example.com./", "https://a%2eb/",
    "https://" + "a" * 64 + ".com/", "https://" + "a." * 127 + "com/", "https://example.com/" + "x" * 2048,
    # addresses, in all the forms that some resolver takes
    "https://127.0.0.1/", "https://127.1/", "https://127.0.1/", "https://2130706433/", "https://0x7f000001/", "https://0x7f.1/",
    "https://0x7f.0.0.0x1/", "https://0177.0.0.1/", "https://017700000001/", "https://127.0.0.01/", "https://127.0.0.1./",
    "https://0/", "https://0.0.0.0/", "https://00000000000000000000177.0.0.1/", "https://127.0.0.1.0x/", "https://a.0x7f/",
    "https://256.256.256.256/", "https://1.2.3/", "https://1.2.3.4.5/", "https://4294967296/",
    "https://10.0.0.1/", "https://172.16.0.1/", "https://172.31.255.255/", "https://192.168.1.1/", "https://100.64.0.1/",
    "https://169.254.169.254/latest/meta-data/", "https://100.100.100.200/", "https://192.0.0.192/", "https://168.63.129.16/",
    "https://198.18.0.1/", "https://203.0.113.7/", "https://192.88.99.1/", "https://224.0.0.1/", "https://239.255.255.250/",
    "https://240.0.0.1/", "https://255.255.255.255/",
    "https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/",
    "https://[::ffff:8.8.8.8]/", "https://[::127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[64:ff9b:1::1]/",
    "https://[2002:7f00:1::]/", "https://[2001:0:7f00:1::]/", "https://[fe80::1]/", "https://[fe80::1%25lo]/",
    "https://[fe80::1%lo]/", "https://[fec0::1]/", "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[ff02::1]/",
    "https://[2001:db8::1]/", "https://[3fff::1]/", "https://[100::1]/", "https://[5f00::1]/",
    "https://::1/", "https://[::1/", "https://[]/", "https://[127.0.0.1]/", "https://[example.com]/", "https://[::1]x/",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS, ids=lambda url: repr(url)[:60])
async def test_a_url_that_nothing_may_be_sent_to_is_refused_and_never_connected_to(url: str) -> None:
    client = WebhookClient()
    with Connects() as connects:
        with pytest.raises(InvalidRequest) as refused:
            client.check(at(url))
        assert refused.value.param == "webhook.url"
        assert (await failure(client, url)).is_final
    assert connects.addresses == []
    client.close()


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com", "https://example.com/", "https://example.com:443/a/b?c=d&e=%20@:",
        "https://example.com:8443?x", "https://a-b.c_d.example.co.uk/~x/(y);z,*'!$+[]=", "https://93.184.215.14/x",
        "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/x", "https://xn--exmple-cua.com/", "https://EXAMPLE.com/",
        "https://hooks.internal/",
    ],
)  # fmt: skip
def test_a_url_of_a_public_receiver_is_taken(url: str) -> None:
    client = WebhookClient()
    client.check(at(url))
    client.close()


def test_a_refusal_does_not_repeat_the_url() -> None:
    client = WebhookClient()
    for url in ("http://example.com/canary", "https://example.com:22/canary", "https://127.0.0.1/canary", "canary://x"):
        with pytest.raises(InvalidRequest) as refused:
            client.check(at(url))
        assert "canary" not in refused.value.message
    client.close()


FORBIDDEN = [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1",
    "100.100.100.200", "169.254.169.254", "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1",
    "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "168.63.129.16", "::1", "::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b:1::1", "2002:7f00:1::1", "2001::1", "2001:db8::1", "3fff::1", "fe80::1%lo", "fec0::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "100::1", "2130706433", "0x7f.1", "0177.0.0.1", "127.1",
]  # fmt: skip


@pytest.mark.parametrize("address", FORBIDDEN)
async def test_a_name_that_leads_to_an_address_that_is_not_public_is_never_connected_to(address: str) -> None:
    client = WebhookClient(look_up=names(address))
    with Connects() as connects:
        client.check(at("https://hooks.example/x"))
        failed = await failure(client, "https://hooks.example/x")
        assert failed.reason == "the host name resolves to an address that is not public"
        assert not failed.is_final, "a name may lead somewhere else later"
    assert connects.addresses == []
    client.close()


async def test_the_systems_own_names_lead_to_no_exception() -> None:
    client = WebhookClient()
    with Connects() as connects:
        await failure(client, "https://localhost/x")
    assert connects.addresses == []
    client.close()


async def test_of_several_addresses_only_those_that_are_allowed_are_connected_to() -> None:
    async with Receiver(host="127.0.0.2") as allowed, Receiver(host="127.0.0.1", port=allowed.port) as forbidden:
        client = WebhookClient(("127.0.0.2/32",), look_up=names("127.0.0.1", "127.0.0.2", "127.0.0.3"))
        with Connects() as connects:
            await client.deliver(message(), at(f"http://hooks.example:{allowed.port}/hook"), time.time())
        assert connects.addresses == [("127.0.0.2", allowed.port)]
        assert (allowed.num_connections, forbidden.num_connections) == (1, 0)
        assert allowed.received[0].headers["host"] == f"hooks.example:{allowed.port}"
        client.close()


async def test_a_name_that_changes_its_address_between_two_looks_is_looked_up_once() -> None:
    looks: list[str] = []
    async with Receiver(host="127.0.0.2") as allowed, Receiver(host="127.0.0.1", port=allowed.port) as forbidden:

        def rebinding(host: str, port: int) -> Sequence[tuple[Any, ...]]:
            looks.append(host)
            return names("127.0.0.2" if len(looks) == 1 else "127.0.0.1")(host, port)

        client = WebhookClient(("127.0.0.2/32",), look_up=rebinding)
        url = f"http://hooks.example:{allowed.port}/hook"
        client.check(at(url))
        await client.deliver(message(), at(url), time.time())
        assert looks == ["hooks.example"]
        with Connects() as connects:
            assert "not public" in (await failure(client, url)).reason
        assert connects.addresses == []
        assert (allowed.num_connections, forbidden.num_connections) == (1, 0)
        client.close()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(code: int) -> None:
    async with Receiver() as target, Receiver(lambda n: status(code, f"Location: {target.url}")) as receiver:
        client = WebhookClient(LOCAL)
        failed = await failure(client, receiver.url)
        assert failed.reason == f"the receiver answered with {code}"
        assert (receiver.num_connections, target.num_connections) == (1, 0)
        client.close()


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Receiver() as receiver, Receiver() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{proxy.port}")
        client = WebhookClient(LOCAL)
        await client.deliver(message(), at(receiver.url), time.time())
        assert (receiver.num_connections, proxy.num_connections) == (1, 0)
        client.close()


async def test_only_what_is_configured_may_be_reached_beside_public_addresses() -> None:
    async with Receiver() as receiver:
        for allowed_networks in ((), ("127.0.0.2/32", "::/0")):
            client = WebhookClient(allowed_networks)
            with pytest.raises(InvalidRequest):
                client.check(at(receiver.url))
            assert (await failure(client, receiver.url)).is_final
            client.close()
        assert receiver.num_connections == 0


@pytest.mark.parametrize(
    "url", ["http://hooks.example/x", "https://hooks.example:4443/x", "http://hooks.example:443/x"]
)
@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
async def test_http_and_other_ports_never_lead_to_a_public_address(url: str, address: str) -> None:
    """A name may be of an allowed network or not; that shows when it is looked up."""
    client = WebhookClient(LOCAL, look_up=names(address))
    with Connects() as connects:
        client.check(at(url))
        failed = await failure(client, url)
        assert failed.reason == "the host name resolves to an address that is not public"
        host = f"[{address}]" if ":" in address else address
        with pytest.raises(InvalidRequest):
            client.check(at(url.replace("hooks.example", host)))
    assert connects.addresses == []
    client.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(204), None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 200_000, None),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nxxxxx", None),
        (status(500), "the receiver answered with 500"),
        (status(404), "the receiver answered with 404"),
        (status(410), "the receiver answered with 410"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n", "the connection failed"),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n", "the connection failed"),
        (b"nonsense\r\n\r\n", "the connection failed"),
        (b"", "the connection failed"),
        (None, "no answer within 0.3 s"),
        (b"HTTP/1.1 200 OK\r\n", "the connection failed"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_receivers_answer(answer: bytes | None, reason: str | None) -> None:
    async def main() -> None:
        async with Receiver(lambda n: answer) as receiver:
            client = WebhookClient(LOCAL, timeout_s=0.3)
            if reason is None:
                await client.deliver(message(), at(receiver.url), time.time())
            else:
                failed = await failure(client, receiver.url)
                assert failed.reason.startswith(reason)
                assert failed.is_final == (reason.endswith("410"))
            client.close()

    with nothing_unclosed():
        asyncio.run(main())


async def test_a_refused_connection_is_a_failed_attempt() -> None:
    async with Receiver() as receiver:
        pass
    client = WebhookClient(LOCAL)
    failed = await failure(client, receiver.url)
    assert failed.reason.startswith("the connection failed")
    assert not failed.is_final
    client.close()


async def test_a_name_server_that_is_slow_costs_the_time_of_one_attempt() -> None:
    gate, has_ended = threading.Event(), threading.Event()

    def slow(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        gate.wait(PATIENCE_S)
        has_ended.set()
        raise OSError("no such name")

    client = WebhookClient(timeout_s=0.2, look_up=slow)
    try:
        failures = await asyncio.gather(*(failure(client, "https://hooks.example/x") for _ in range(8)))
        assert not has_ended.is_set()
        assert {each.reason for each in failures} == {"no answer within 0.2 s"}
        assert await asyncio.to_thread(lambda: 3) == 3, "the threads of others are free"
    finally:
        gate.set()
        client.close()


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The TLS of a server with a certificate for this name or address, and of clients that trust it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    try:
        shown: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        shown = x509.DNSName(name)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([shown]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    pem = made.public_bytes(serialization.Encoding.PEM)
    path.write_bytes(
        pem
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=pem.decode())


async def test_tls_is_verified_against_the_hosts_name(tmp_path: Path) -> None:
    server, trusting = certificate(tmp_path, "hooks.example")
    async with Receiver(tls=server) as receiver:
        look_up = names("127.0.0.1")
        client = WebhookClient(LOCAL, look_up=look_up, tls=trusting)
        await client.deliver(message(), at(f"https://hooks.example:{receiver.port}/hook"), time.time())
        assert len(receiver.received) == 1
        for host, tls in (("other.example", trusting), ("hooks.example", None)):
            other = WebhookClient(LOCAL, look_up=look_up, tls=tls)
            failed = await failure(other, f"https://{host}:{receiver.port}/hook")
            assert failed.reason == "the certificate is not valid for this host"
            other.close()
        assert len(receiver.received) == 1, "nothing was said to them"
        client.close()


async def test_what_arrives(tmp_path: Path) -> None:
    async with Receiver(lambda n: OK) as receiver:
        client = WebhookClient(LOCAL)
        await client.deliver(message(), at(f"{receiver.url}?a=%20b&c"), 1_700_000_000.9)
        [received] = receiver.received
        assert received.line == "POST /hook?a=%20b&c HTTP/1.1"
        assert received.headers["content-type"] == "application/json"
        assert received.headers["webhook-id"] == "evt_1"
        assert received.headers["webhook-timestamp"] == "1700000000"
        assert received.body == message().body()
        client.close()
