"""A signed chain is read forever, and written today as it was then; a stranger proves it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deltachain.chain.chain import Chain
from deltachain.chain.trust import Trust, TrustedKeys
from deltachain.store import MemoryStore
from deltachain.verify import verify
from tests.format import freeze, freeze_signed, stranger_chain
from tests.format.freeze_signed import FOLDER, KEY
from tests.format.stranger import RefusedError

FILES = freeze.frozen(FOLDER)
STRANGE = Ed25519PrivateKey.from_private_bytes(b"\7" * 32).public_key().public_bytes_raw()
OWN = KEY.public.raw

Get = Callable[[str], bytes | None]


def store_of(files: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in files.items():
        store.put(key, data)
    return store


@pytest.mark.parametrize("trust", [Trust(), Trust(trusted=TrustedKeys((KEY.public,)))])
def test_the_frozen_chain_is_read_with_and_without_trusted_keys(trust: Trust) -> None:
    proofs = list(verify(Chain.open(store_of(FILES), trust)))
    assert [proof.signatures for proof in proofs] == [(), *[(KEY.public.key_id,)] * 2]
    by = (KEY.public.key_id,) if trust.trusted else ()
    assert [proof.signed_by for proof in proofs] == [(), by, by]
    assert [edge.kind for proof in proofs for edge in proof.edges] == [
        *("anchor", "delta", "anchor", "delta"),
    ]


def test_the_writer_still_makes_the_same_bytes() -> None:
    assert dict(freeze_signed.build()) == FILES


def test_what_is_frozen_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        freeze.write(FOLDER, FILES)
    freeze.write(tmp_path / "other", dict(freeze_signed.build()))
    assert len([file for file in (tmp_path / "other").rglob("*") if file.is_file()]) == len(FILES)


def weights(get: Get, *trusted: bytes) -> list[stranger_chain.Weights]:
    chain = stranger_chain.SignedChain(get, list(trusted))
    return [chain.follow(way) for v in range(chain.head() + 1) for way in chain.routes(v)]


@pytest.mark.parametrize("trusted", [(OWN,), (STRANGE, OWN)])
def test_the_stranger_proves_the_chain_by_every_way(trusted: tuple[bytes, ...]) -> None:
    found = weights(FILES.get, *trusted)
    numbers = [0, 1, 1, 1, 1]
    assert found == [{"w": freeze_signed.version(number).tolist()} for number in numbers]


def test_the_stranger_reads_a_signed_chain_without_keys() -> None:
    assert stranger_chain.Chain(FILES.get).head() == 2


@pytest.mark.parametrize("trusted", [(), (STRANGE,)])
def test_the_stranger_refuses_a_chain_by_no_trusted_key(trusted: tuple[bytes, ...]) -> None:
    with pytest.raises(RefusedError, match="not signed"):
        weights(FILES.get, *trusted)


@pytest.mark.parametrize("key", [key for key in FILES if not key.startswith("assets/")])
def test_the_stranger_refuses_a_chain_with_one_byte_changed(key: str) -> None:
    data = bytearray(FILES[key])
    data[-20] ^= 1
    with pytest.raises(RefusedError):
        weights(lambda asked: bytes(data) if asked == key else FILES.get(asked), OWN)
