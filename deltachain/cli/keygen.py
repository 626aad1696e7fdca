"""``deltachain keygen`` and ``deltachain sign``: make a key, and begin to sign a chain with it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Url
from deltachain.errors import ConfigError, SignatureError, no_version

if TYPE_CHECKING:
    from deltachain.chain.chain import Committed
    from deltachain.chain.trust import Trust
    from deltachain.store import Store

SHOWN_DIGITS = 8  # digits of a key id in tables


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file for the private key.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Make a key with which a publisher signs, and print its public key.

    The new file holds the private key, readable by its owner alone: the publisher's
    DELTACHAIN_SIGNING_KEY. The printed line, or a file of such lines, is the followers'
    DELTACHAIN_TRUSTED_KEYS.

    Example: `deltachain keygen policy.key`
    """
    from deltachain.chain.trust import SigningKey

    key = SigningKey.generate()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        hint = "name another file; a private key is never overwritten"
        raise ConfigError(f"{file} exists", hint=hint) from exc
    except OSError as exc:
        hint = "name a file in a folder that exists and can be written to"
        raise ConfigError(f"{file}: {exc.strerror}", hint=hint) from exc
    with os.fdopen(descriptor, "wb") as out:
        out.write(key.pem())
    if as_json:
        public = {"public_key": str(key.public), "key_id": key.public.key_id}
        c.write_json({"file": str(file), **public})
    else:
        print(key.public)


def sign(url: Url, *, as_json: AsJson = False) -> None:
    """Begin to sign a chain, or sign tags and the newest prune record again with a new key.

    Signs an unsigned chain's identity with the key in DELTACHAIN_SIGNING_KEY and commits a signed
    version without changes, which fences the publisher. The whole chain then counts as signed:
    verify it before. On a signed chain, run it with a new key before the old one leaves
    DELTACHAIN_TRUSTED_KEYS.

    Example: `deltachain sign /mnt/policy`
    """
    from deltachain.chain.trust import Trust
    from deltachain.store import open_store

    trust = Trust.of_writer()
    if trust.key is None:
        hint = "`deltachain keygen` makes a key"
        raise ConfigError("DELTACHAIN_SIGNING_KEY is not set", hint=hint)
    with closing(open_store(url)) as store:
        is_new, committed, again = _sign(store, trust)
    report = {"url": url, "committed": is_new, "version": committed.version, **signers(committed)}
    if as_json:
        c.write_json(report | {"signed_again": list(again)})
        return
    if is_new:
        c.done(f"version {committed.version} is signed by {trust.key.public.key_id}")
    for key in again:
        c.done(f"signed again as {key}")
    if not is_new and not again:
        by = ", ".join(committed.signed_by)
        c.out().print(f"nothing to do: version {committed.version} is signed by {by}")


def _sign(store: "Store", trust: "Trust") -> "tuple[bool, Committed, tuple[str, ...]]":
    """Sign what is not; return whether a version was committed, the head, and other records."""
    from deltachain.chain.chain import Chain
    from deltachain.chain.identity import refuse_mirror
    from deltachain.chain.tags import sign_again
    from deltachain.publish.writer import take_over

    try:
        head = Chain.open(store, trust).head()
    except SignatureError:
        head = None
    if head is not None:
        return False, head, sign_again(Chain.open(store, trust))
    refuse_mirror(store, trust.unchecked())
    chain = Chain.open(store, trust.unchecked())
    again = sign_again(chain)  # before the head is signed: killed here, the command starts anew
    for key, data in chain.sign_identity().items():
        store.put(key, data)
    numel = sum(spec.numel for spec in chain.table.specs())
    writer = take_over(chain, numel=numel, metadata={})
    if writer is None or writer.parent is None:
        raise no_version(store.url, "its identity is signed now")
    return True, Chain.open(store, trust).read(writer.parent.version), again


def signers(committed: "Committed") -> dict[str, list[str]]:
    ids = dict.fromkeys(signature.key_id for signature in committed.signatures)
    return {"signatures": list(ids), "signed_by": list(committed.signed_by)}


def signed(report: Mapping[str, Sequence[str]], digits: int | None = None) -> str:
    """Describe the result of :func:`signers`, with some digits of each key; empty for none."""
    if report["signed_by"]:
        return ", ".join(key_id[:digits] for key_id in report["signed_by"])
    ids = ", ".join(c.clean(key_id[:64][:digits]) for key_id in report["signatures"])
    return f"{ids} (not checked)" if ids else ""
