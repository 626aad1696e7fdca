"""A private CA, client certificates and proxies, for every client of ours."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deltachain.control.agent import EngineClient
from deltachain.control.announce import Fleet
from deltachain.control.replica_client import ReplicaClient, make_client
from deltachain.errors import ConfigError, ControlPlaneError, StoreUnavailableError
from deltachain.replica.leader import Leader
from deltachain.store import open_store
from deltachain.tls import TlsFiles
from tests.support.hub.server import HubServer
from tests.support.seaweed import Seaweed
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.replica.replicas import Followed
from tests.unit.tls import PrivateCa, http_proxy, tls_front

NAMES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE", "NO_PROXY", "no_proxy"),
    *(f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL")),
    *(f"{kind}_proxy" for kind in ("http", "https", "all")),
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ca(tmp_path: Path) -> PrivateCa:
    return PrivateCa(tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path / "here")


@pytest.fixture
def leader(here: Followed) -> Iterator[Leader]:
    for made in leader_of(here):
        made.update(1)
        yield made


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


@contextmanager
def secured(leader: Leader, ca: PrivateCa, *, asks_clients: bool = False) -> Iterator[str]:
    """A replica behind a certificate of a private CA; its address."""
    context = ca.server_context(asks_clients=asks_clients)
    with served(app_of(leader, is_open=True)) as plain, tls_front(port_of(plain), context) as url:
        yield url


def check_status(url: str, token: str = "") -> None:
    with ReplicaClient(url, token=token) as client:
        assert client.status().version == 1


def test_control_clients_trust_a_private_ca(
    leader: Leader, ca: PrivateCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secured(leader, ca) as url:
        with pytest.raises(ControlPlaneError, match="certificate") as caught:
            check_status(url)
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.file))
        check_status(url)
        with Fleet([url]) as fleet:
            assert fleet.announce(1, deadline=30).enough
        with closing(EngineClient(url, key="", timeout_s=10, hint="")) as stock:
            assert stock.has("/healthz/deltachain")
        with make_client(base_url=url) as client_of_vllm:
            assert client_of_vllm.get("/healthz/deltachain").text == "ok"


def test_a_folder_of_cas_is_trusted(
    leader: Leader, ca: PrivateCa, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hashed = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", str(ca.file)],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    folder = tmp_path / "cas"
    folder.mkdir()
    (folder / f"{hashed}.0").write_bytes(ca.file.read_bytes())
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))
    with secured(leader, ca) as url:
        check_status(url)


def test_a_server_that_asks_for_it_gets_a_client_certificate(
    leader: Leader, ca: PrivateCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca.file))
    with secured(leader, ca, asks_clients=True) as url:
        with pytest.raises(ControlPlaneError):
            check_status(url)
        monkeypatch.setenv("DELTACHAIN_CLIENT_CERT", str(ca.client))
        check_status(url)


def test_s3_uses_a_private_ca_and_a_client_certificate(
    seaweed: Seaweed, ca: PrivateCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_front(seaweed.port, ca.server_context(asks_clients=True)) as endpoint:
        options = seaweed.options | {"endpoint_url": endpoint}

        def write() -> None:
            store = open_store(seaweed.url("tls"), options)
            store.put("a/b", b"bits")
            assert store.get("a/b") == b"bits"
            store.close()

        with pytest.raises(StoreUnavailableError, match="SSLError") as caught:
            write()
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.file))
        monkeypatch.setenv("DELTACHAIN_CLIENT_CERT", str(ca.client))
        write()
        monkeypatch.setenv("AWS_CA_BUNDLE", os.fspath(ca.client))  # boto3's own comes first
        with pytest.raises(StoreUnavailableError, match="SSLError"):
            write()


def test_the_hub_is_reached_through_a_private_ca(
    hub: HubServer, bucket: str, ca: PrivateCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import close_session  # noqa: PLC0415 - an extra

    for name, value in hub.env().items():
        monkeypatch.setenv(name, value)
    with tls_front(port_of(hub.url), ca.server_context()) as endpoint:
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.file))
        close_session()  # it reads the environment once
        store = open_store(bucket, {"endpoint": endpoint, "deadline_s": 20})
        try:
            assert store.find("a/b") is None
        finally:
            store.close()
            close_session()


def test_a_proxy_is_used_but_for_this_machine(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with (
        served(app_of(leader, token="t")) as plain,  # noqa: S106
        http_proxy(port_of(plain), seen) as proxy,
    ):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        check_status("http://replica.invalid:8000", "t")
        assert seen[0].startswith("GET http://replica.invalid:8000/v1/deltachain/status")
        check_status(plain, "t")
        assert len(seen) == 1


def test_s3_goes_through_a_proxy(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with http_proxy(seaweed.port, seen) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        endpoint = f"http://s3.invalid:{seaweed.port}"
        store = open_store(seaweed.url("proxied"), seaweed.options | {"endpoint_url": endpoint})
        store.put("a/b", b"bits")
        store.close()
    assert any("s3.invalid" in line for line in seen)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SSL_CERT_FILE": "/absent"}, "SSL_CERT_FILE"),
        ({"DELTACHAIN_CLIENT_CERT": "/absent"}, "DELTACHAIN_CLIENT_CERT"),
        ({"DELTACHAIN_CLIENT_KEY": "/absent"}, "without DELTACHAIN_CLIENT_CERT"),
    ],
)
def test_a_file_that_is_not_there_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        TlsFiles.of(environment)
    assert caught.value.hint


def test_a_file_without_certificates_is_named(tmp_path: Path, ca: PrivateCa) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match="has no certificates"):
        TlsFiles.of({"SSL_CERT_FILE": str(wrong)}).context()
    with pytest.raises(ConfigError, match="cannot identify this client"):
        TlsFiles.of({"DELTACHAIN_CLIENT_CERT": str(ca.file)}).context()


def test_a_proxy_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "gopher://proxy")
    with pytest.raises(ConfigError, match="proxy") as caught:
        ReplicaClient("https://replica:8000")
    assert "HTTPS_PROXY" in caught.value.hint
