"""Clients of boto3, from options, environment and profile."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import boto3
import botocore.session
import msgspec
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError

from deltachain.errors import ConfigError
from deltachain.retry import DEADLINE_S
from deltachain.store.s3.errors import is_aws
from deltachain.tls import TlsFiles

Client: TypeAlias = Any  # an S3 client of boto3, whose methods are created at run time

_CONNECTIONS: Final = 64
_CONNECT_S: Final = 5.0
_READ_S: Final = 30.0

_CREDENTIAL_FILES: Final = ("credentials_file", "config_file")

_CHECKSUMS: Final = ("request_checksum_calculation", "response_checksum_validation")


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    key: str | None = None
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    region: str | None = None
    endpoint_url: str | None = None
    client_kwargs: dict[str, Any] = {}
    config_kwargs: dict[str, Any] = {}
    anon: bool | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0, lt=1e9)] = DEADLINE_S


def options_of(given: Mapping[str, Any]) -> _Options:
    try:
        options = msgspec.convert(dict(given), _Options)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"s3:// stores do not take these options: {exc}",
            hint=f"they have {', '.join(_Options.__struct_fields__)}",
        ) from exc
    if (options.key is None) != (options.secret is None):
        raise ConfigError("the options key and secret of an s3:// store go together")
    return options


def make_client(given: Mapping[str, Any], *, attempts: int = 1) -> tuple[Client, bool]:
    """Create a client of a number of attempts; return whether its endpoint is not AWS's."""
    options = options_of(given)
    of_client = {
        "aws_access_key_id": options.key,
        "aws_secret_access_key": options.secret,
        "aws_session_token": options.token,
        "region_name": options.region,
        "endpoint_url": options.endpoint_url,
    }
    arguments: dict[str, Any] = {name: value for name, value in of_client.items() if value}
    arguments |= options.client_kwargs
    _check_endpoint(arguments.get("endpoint_url"))
    try:
        core = botocore.session.Session(profile=options.profile or None)
        core.register_component("data_loader", _loader())
        if "aws_access_key_id" not in arguments:
            _reread_credentials(core)
        tls = TlsFiles.of(os.environ)
        arguments = _trusted(core, tls, arguments) | arguments
        config = _config(tls, options.deadline_s)
        of_user = arguments.pop("config", Config()).merge(_config_of(options, attempts))
        session = boto3.Session(botocore_session=core)
        client: Client = session.client("s3", config=config.merge(of_user), **arguments)
        own = not is_aws(urlsplit(client.meta.endpoint_url).hostname or "")
        if own:
            client.close()
            config = config.merge(_plain_requests(core)).merge(of_user)
            client = session.client("s3", config=config, **arguments)
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
    return client, own


def _config(tls: TlsFiles, deadline_s: float) -> Config:
    return Config(
        connect_timeout=min(_CONNECT_S, deadline_s),
        read_timeout=min(_READ_S, deadline_s),
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
        user_agent_extra="deltachain",
        client_cert=tls.client,
    )


def _config_of(options: _Options, attempts: int) -> Config:
    asked = dict(options.config_kwargs)
    asked["retries"] = {"total_max_attempts": attempts, "mode": "standard"}
    if options.anon:
        asked["signature_version"] = UNSIGNED
    return Config(**asked)


# botocore is untyped, so this base class is too.
class _RereadCredentials(Credentials):  # type: ignore[misc]
    """Credentials that are resolved anew once the files that name them have changed.

    botocore reads them once. Tools that hand out temporary keys replace the file before these end.
    While the files cannot be read or name none, the last ones stay in use.
    """

    def __init__(self, found: Credentials, profile: str | None, files: list[Path]) -> None:
        super().__init__("", "", method=found.method)
        self._found, self._profile, self._files = found, profile, files
        self._lock = Lock()
        self._read = self._stamps()

    def load_credentials(self) -> Credentials:
        return self

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
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
        return [_stamp(file) for file in self._files]


def _reread_credentials(core: botocore.session.Session) -> None:
    found = botocore.session.Session(profile=core.profile).get_credentials()
    if found is not None and found.method != "env":
        files = [Path(core.get_config_variable(name)).expanduser() for name in _CREDENTIAL_FILES]
        reread = _RereadCredentials(found, core.profile, files)
        core.register_component("credential_provider", reread)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _trusted(
    core: botocore.session.Session, tls: TlsFiles, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    bundle = core.get_config_variable("ca_bundle")
    if not bundle:
        return {} if tls.ca_file is None else {"verify": str(tls.ca_file)}
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


def _plain_requests(core: botocore.session.Session) -> Config:
    """Return the configuration without boto3's own checksums, unless the user asks for them.

    Many S3-compatible servers reject these, or answer a range with the checksum of the whole
    object. Objects are verified by their own digests anyway.
    """
    profile = core.get_scoped_config()
    unasked: dict[str, Any] = {
        name: "when_required"
        for name in _CHECKSUMS
        if not os.environ.get(f"AWS_{name.upper()}") and name not in profile
    }
    return Config(**unasked)


def _check_endpoint(url: str | None) -> None:
    """Refuse an endpoint URL with credentials, which would end up in logs."""
    if url and "@" in urlsplit(url).netloc:
        raise ConfigError(
            "the endpoint of an s3:// store must not have a user or a password in it",
            hint="give them by the options key and secret, or by AWS_*",
        )
