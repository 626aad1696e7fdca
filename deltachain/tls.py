"""Certificates and keys for TLS, named by the environment as in other programs.

All clients of ours use them: of replicas and engines, of S3, and of the Hub, whose library reads
``SSL_CERT_FILE`` itself.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deltachain.environment import read
from deltachain.errors import ConfigError
from deltachain.redact import redacted_path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    ca_file: Path | None = None  # SSL_CERT_FILE; None for the public CAs
    ca_folder: Path | None = None  # SSL_CERT_DIR, with hashes for names; if there is no file
    client_cert: Path | None = None  # DELTACHAIN_CLIENT_CERT
    client_key: Path | None = None  # DELTACHAIN_CLIENT_KEY, if it is not in the same file

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "TlsFiles":
        given = read(environment)
        ca_file, ca_folder = environment.get("SSL_CERT_FILE"), environment.get("SSL_CERT_DIR")
        found = cls(
            ca_file=Path(ca_file) if ca_file else None,
            ca_folder=Path(ca_folder) if ca_folder else None,
            client_cert=given.get("CLIENT_CERT"),
            client_key=given.get("CLIENT_KEY"),
        )
        if found.client_key and not found.client_cert:
            raise ConfigError(
                "DELTACHAIN_CLIENT_KEY is set without DELTACHAIN_CLIENT_CERT",
                hint="name the file of the certificate that belongs to this key",
            )
        _check("SSL_CERT_FILE", found.ca_file)
        if ca_folder and not ca_file and not any(map(os.path.isdir, ca_folder.split(os.pathsep))):
            raise ConfigError(
                f"SSL_CERT_DIR is {ca_folder!r}, which is no folder",
                hint="correct the path, or unset it to trust the public CAs",
            )
        _check("DELTACHAIN_CLIENT_CERT", found.client_cert)
        _check("DELTACHAIN_CLIENT_KEY", found.client_key)
        return found

    @property
    def client(self) -> tuple[str, str] | str | None:
        if self.client_cert is None:
            return None
        if self.client_key is None:
            return str(self.client_cert)
        return str(self.client_cert), str(self.client_key)

    def context(self) -> ssl.SSLContext:
        files = [file for file in (self.ca_file, self.client_cert, self.client_key) if file]
        return _context(self, tuple(file.stat().st_mtime_ns for file in files))


# A fleet has a client for each replica, and reading the public CAs takes 20 ms.
@lru_cache(maxsize=4)
def _context(files: TlsFiles, _: tuple[int, ...]) -> ssl.SSLContext:
    try:
        if files.ca_file:
            found = ssl.create_default_context(cafile=files.ca_file)
        elif files.ca_folder:
            found = ssl.create_default_context(capath=files.ca_folder)
        else:
            import httpx  # noqa: PLC0415 - takes a while; S3 needs only the names

            found = httpx.create_ssl_context(trust_env=False)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{files.ca_file or files.ca_folder} has no certificates: {exc}",
            hint="SSL_CERT_FILE names a file of certificates in PEM format",
        ) from exc
    if files.client_cert is not None:
        try:
            found.load_cert_chain(files.client_cert, files.client_key, password=_refuse_password)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"{files.client_cert} cannot identify this client: {exc}",
                hint="DELTACHAIN_CLIENT_CERT and DELTACHAIN_CLIENT_KEY name a certificate and its "
                "private key, in PEM format and without a password",
            ) from exc
    return found


def _check(name: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{name} is {redacted_path(path)!r}, which is no file", hint="correct the path"
        )


def _refuse_password() -> str:
    """Raise instead of the question for a password, which nobody may be there to answer."""
    raise ValueError("its private key has a password")
