"""Construction of a boto3 client from options, environment and profile."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError

from deltachain.errors import ConfigError
from deltachain.store.bounds import BoundedSocket
from deltachain.tls import TlsFiles

Client: TypeAlias = Any
"""An S3 client of boto3, whose methods are created at run time."""

_TEXTS: Final = ("key", "secret", "token", "profile", "region", "endpoint_url")
_TABLES: Final = ("client_kwargs", "config_kwargs")
_KNOWN: Final = (*_TEXTS, *_TABLES, "anon", "deadline_s")

_CONNECTIONS: Final = 64
_CONNECT_S: Final = 5.0
_READ_S: Final = 30.0

_CREDENTIAL_FILES: Final = ("credentials_file", "config_file")
"""Settings of botocore that name the files with credentials."""

_CHECKSUMS: Final = ("request_checksum_calculation", "response_checksum_validation")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options and values of a wrong type, which are never shown.

    Raises:
        ConfigError: An option is unknown or of a wrong type.
    """
    unknown = sorted(options.keys() - set(_KNOWN))
    if unknown:
        raise ConfigError(
            f"s3:// stores have no option {', '.join(unknown)}",
            hint=f"they have {', '.join(_KNOWN)}",
        )
    for name in _TEXTS:
        if not isinstance(options.get(name, ""), str | None):
            raise ConfigError(f"the option {name} of an s3:// store must be text")
    for name in _TABLES:
        if not isinstance(options.get(name, {}), Mapping):
            raise ConfigError(f"the option {name} of an s3:// store must be a mapping")
    if ("key" in options) != ("secret" in options):
        raise ConfigError("the options key and secret of an s3:// store go together")


def make_client(options: Mapping[str, Any], *, deadline_s: float) -> tuple[Client, bool]:
    """Create a client without retries; return it and whether its endpoint is the user's own.

    Raises:
        ConfigError: The options, the environment or the profile are invalid.
    """
    check_options(options)
    given = {
        "aws_access_key_id": options.get("key"),
        "aws_secret_access_key": options.get("secret"),
        "aws_session_token": options.get("token"),
        "region_name": options.get("region"),
        "endpoint_url": options.get("endpoint_url"),
    }
    arguments = {name: value for name, value in given.items() if value}
    arguments |= options.get("client_kwargs", {})
    _check_endpoint(arguments.get("endpoint_url"))
    try:
        core = botocore.session.Session(profile=options.get("profile") or None)
        core.register_component("data_loader", _loader())
        if "aws_access_key_id" not in arguments:
            _reread_credentials(core)
        own_endpoint = "endpoint_url" in arguments or _configures_endpoint(core)
        config = _config(core, own_endpoint=own_endpoint, deadline_s=deadline_s)
        arguments = _tls(core, arguments) | arguments
        if "config" in arguments:
            config = config.merge(arguments.pop("config"))
        config = config.merge(Config(**_config_arguments(options)))
        session = boto3.Session(botocore_session=core)
        client: Client = session.client("s3", config=config, **arguments)
    except ConfigError:  # a ValueError too
        raise
    except BotoCoreError as exc:
        raise ConfigError(
            f"boto3 cannot be configured: {type(exc).__name__}",
            hint="check AWS_PROFILE, AWS_* and the store options",
        ) from exc
    except (TypeError, ValueError) as exc:
        # Caused by the user's settings; not shown, as it may contain an endpoint or a token.
        if "endpoint" in str(exc):
            raise ConfigError(
                "the endpoint of S3 is no URL",
                hint="write AWS_ENDPOINT_URL, or the option endpoint_url, as https://HOST:PORT",
            ) from exc
        raise ConfigError(
            "boto3 does not take these options",
            hint="check endpoint_url, region, client_kwargs and config_kwargs",
        ) from exc
    _check_endpoint(client.meta.endpoint_url)
    bound_sockets(client)
    return client, own_endpoint


# botocore is untyped, so these base classes are too.
class _RereadCredentials(Credentials):  # type: ignore[misc]
    """Credentials that are resolved anew once the files that name them have changed.

    botocore reads them once. Tools that hand out temporary keys replace the file before these end.
    While the files cannot be read or name none, the last ones stay in use.
    """

    def __init__(self, found: Credentials, core: botocore.session.Session) -> None:
        super().__init__("", "", method=found.method)
        self._files = [core.get_config_variable(name) for name in _CREDENTIAL_FILES]
        self._profile = core.profile
        self._lock = threading.Lock()
        self._found = found
        self._read = self._stamps()

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials to sign one request with."""
        with self._lock:
            now = self._stamps()
            if now != self._read:
                try:
                    found = botocore.session.Session(profile=self._profile).get_credentials()
                except BotoCoreError:  # half written
                    found = None
                if found is not None and found.method == self.method:
                    self._found, self._read = found, now
            return self._found.get_frozen_credentials()

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(Path(file).expanduser()) for file in self._files]


def _reread_credentials(core: botocore.session.Session) -> None:
    """Make a session read its credentials again once their files have changed."""
    found = core.get_credentials()
    if found is not None and found.method != "env":
        core._credentials = _RereadCredentials(found, core)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Connection(AWSHTTPConnection):  # type: ignore[misc]
    sock: Any

    def connect(self) -> None:
        super().connect()
        self.sock = BoundedSocket(self.sock)


class _TlsConnection(AWSHTTPSConnection):  # type: ignore[misc]
    sock: Any

    def connect(self) -> None:
        super().connect()
        self.sock = BoundedSocket(self.sock)


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return super().urlopen(*args, **{**kwargs, "redirect": False})


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection

    def urlopen(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return super().urlopen(*args, **{**kwargs, "redirect": False})


def bound_sockets(client: Client) -> None:
    """Bind a client's connections to the deadlines of their calls; refuse redirects.

    botocore has no setting for connection classes. If a later version keeps its connections
    elsewhere, each read still has a timeout, but a server that trickles bytes can exceed a call's
    deadline.
    """
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    pools = getattr(session, "_pool_classes_by_scheme", None)
    if isinstance(pools, dict):
        pools.update(http=_Pool, https=_TlsPool)


def tls_arguments() -> tuple[dict[str, Any], Config]:
    """Return CAs and client certificate of the environment, as boto3 takes them.

    ``AWS_CA_BUNDLE`` comes before ``SSL_CERT_FILE``.

    Raises:
        ConfigError: A file does not exist; see :class:`TlsFiles`.
    """
    files = TlsFiles.of(os.environ)
    is_ours = files.ca_file is not None and not os.environ.get("AWS_CA_BUNDLE")
    verify = {"verify": str(files.ca_file)} if is_ours else {}
    return verify, Config(client_cert=files.client)


def _tls(core: botocore.session.Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument for the CAs, unless boto3's own settings name some.

    Raises:
        ConfigError: They name a file that does not exist.
    """
    bundle = core.get_config_variable("ca_bundle")
    if not bundle:
        return tls_arguments()[0]
    if "verify" not in arguments and not Path(bundle).is_file():
        raise ConfigError(
            f"the CAs for S3 are to be in {bundle}, which is no file",
            hint="correct AWS_CA_BUNDLE, or ca_bundle of the profile",
        )
    return {}


@cache
def _loader() -> Any:  # noqa: ANN401 - untyped
    """Return boto3's model of S3, loaded once, as parsing takes a third of a second."""
    return botocore.session.Session().get_component("data_loader")


def _config_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(options.get("config_kwargs", {}))
    if options.get("anon"):
        arguments["signature_version"] = UNSIGNED
    # A conditional write must know how often it was sent, so only the store retries.
    arguments["retries"] = {"total_max_attempts": 1, "mode": "standard"}
    return arguments


def _config(core: botocore.session.Session, *, own_endpoint: bool, deadline_s: float) -> Config:
    config = Config(
        connect_timeout=min(_CONNECT_S, deadline_s),
        read_timeout=min(_READ_S, deadline_s),
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
        user_agent_extra="deltachain",
    ).merge(tls_arguments()[1])
    if not own_endpoint:
        return config
    # Many S3-compatible servers reject boto3's default checksums, or answer a range with the
    # checksum of the whole object. Objects are verified by their own digests anyway.
    profile = core.get_scoped_config()
    asked: dict[str, Any] = {
        name: "when_required"
        for name in _CHECKSUMS
        if not os.environ.get(f"AWS_{name.upper()}") and name not in profile
    }
    return config.merge(Config(**asked))


def _configures_endpoint(core: botocore.session.Session) -> bool:
    """Return whether the environment or the profile sets an endpoint other than AWS."""
    if core.get_config_variable("ignore_configured_endpoint_urls"):
        return False
    profile = core.get_scoped_config()
    services = core.full_config.get("services", {}).get(profile.get("services", ""), {})
    return bool(
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or services.get("s3", {}).get("endpoint_url")
        or profile.get("endpoint_url")
    )


def _check_endpoint(url: str | None) -> None:
    """Refuse an endpoint URL with credentials, which would end up in logs."""
    if url and "@" in urlsplit(url).netloc:
        raise ConfigError(
            "the endpoint of an s3:// store must not have a user or a password in it",
            hint="give them by the options key and secret, or by AWS_*",
        )
