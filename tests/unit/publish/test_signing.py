"""Publishers that sign: everything they write, and nothing that others wrote."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.format.documents import Edge, EdgeRecord, Manifest, seal, unseal
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY, manifest_key, signature_key
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Buffer
from deltachain.verify import verify
from tests.support.backup import objects_of
from tests.support.models import TinyModel, bits_of, same
from tests.unit.manifest_chains import TABLE, SingleWriterStore, manifest_after
from tests.unit.publish.chains import Attach, NewThreads, publish

KEY, OTHER = (SigningKey.of(bytes([seed]) * 32) for seed in (1, 2))
TRUSTED = Trust(trusted=TrustedKeys((KEY.public,)))
OWNER = Trust(key=KEY, trusted=TrustedKeys((KEY.public,)))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(KEY.pem())
    return file


def test_a_publisher_signs_all_that_it_writes(
    attach: Attach, store: MemoryStore, key_file: Path
) -> None:
    model = TinyModel()
    publisher = attach(model, signing_key=key_file, anchor_factor=0.01)
    publish(publisher, model, 1, 2, 3)
    publisher.close()
    again = attach(model, signing_key=key_file)
    publish(again, model, 4)
    again.close()
    proofs = list(verify(Chain.open(store, TRUSTED)))
    assert all(proof.signed_by == (KEY.public.key_id,) for proof in proofs)
    records = [info.key for info in store.list("edges/")]
    assert records
    for key in records:
        data = store.get(key)
        unseal(data, EdgeRecord, key=key)
        chain = Chain.open(store, Trust()).identity.chain
        TRUSTED.check(data, EdgeRecord, chain=chain, key=key)
    replica = TinyModel()
    config = SubscribeConfig(url=store.url, trusted_keys=str(KEY.public))
    Subscriber(config, replica, store=store).update()
    assert same(bits_of(replica), bits_of(model))


def test_a_publisher_with_a_key_has_a_heartbeat_until_it_is_closed(
    attach: Attach, key_file: Path, new_threads: NewThreads
) -> None:
    attach(TinyModel(), on=MemoryStore())
    assert not new_threads("deltachain-heartbeat")
    publisher = attach(TinyModel(), signing_key=key_file)
    assert len(new_threads("deltachain-heartbeat")) == 1
    publisher.close()
    assert not new_threads("deltachain-heartbeat")


def test_the_key_of_the_environment_signs_too(
    attach: Attach, store: MemoryStore, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(key_file))
    attach(TinyModel()).close()
    assert Chain.open(store, TRUSTED).read(0).signed_by == (KEY.public.key_id,)


def test_a_signed_chain_goes_on_with_a_key_alone_and_from_no_unsigned_version(
    attach: Attach, store: MemoryStore, key_file: Path
) -> None:
    attach(TinyModel(), signing_key=key_file).close()
    before = objects_of(store).keys()
    with pytest.raises(errors.ConfigError, match="has no signing key"):
        attach(TinyModel())
    assert objects_of(store).keys() == before
    chain = Chain.open(store, Trust())
    head = chain.read(0)
    edge = Edge(kind="delta", base=0)
    chain.commit(
        replace(head.manifest, version=1, parent=head.digest, base_state="", edge=edge, recent=())
    )
    before = objects_of(store).keys()
    with pytest.raises(errors.SignatureError, match="it has no signature"):
        attach(TinyModel(), signing_key=key_file)
    assert objects_of(store).keys() == before


def test_a_publisher_with_a_key_takes_no_unsigned_chain(
    attach: Attach, store: MemoryStore, key_file: Path
) -> None:
    attach(TinyModel()).close()
    with pytest.raises(errors.SignatureError) as caught:
        attach(TinyModel(), signing_key=key_file)
    assert "deltachain sign" in caught.value.hint
    store.delete(CHAIN_KEY)
    with pytest.raises(errors.SignatureError, match="manifests/"):
        attach(TinyModel(), signing_key=key_file)
    assert store.find(CHAIN_KEY) is None


def test_a_new_key_goes_on_where_the_old_one_is_trusted(
    attach: Attach, store: MemoryStore, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel()
    attach(model, signing_key=key_file).close()
    new = key_file.with_name("new")
    new.write_bytes(OTHER.pem())
    with pytest.raises(errors.SignatureError):
        attach(model, signing_key=new)
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(KEY.public))
    publish(attach(model, signing_key=new), model, 1)
    later = Chain.open(store, Trust(trusted=TrustedKeys((OTHER.public,))))
    assert [one.signed_by for one in later.history(0, 2)] == [(), *[(OTHER.public.key_id,)] * 2]


@pytest.mark.parametrize("what", ["gone", "false"])
def test_the_signature_of_the_identity_is_put_back(
    attach: Attach, store: MemoryStore, key_file: Path, what: str
) -> None:
    model = TinyModel()
    publisher = attach(model, signing_key=key_file)
    key = signature_key(Chain.open(store, Trust()).identity.chain, KEY.public.key_id)
    good = store.get(key)
    publish(publisher, model, 1)
    store.delete(key)
    if what == "false":
        store.put(key, b"{}")
    publish(publisher, model, *range(2, 10))  # it is looked at every eight versions
    assert store.get(key) == good


def test_an_identity_that_is_made_anew_is_signed_anew(
    attach: Attach, store: MemoryStore, key_file: Path
) -> None:
    model = TinyModel()
    attach(model, signing_key=key_file).close()
    before = store.get(CHAIN_KEY)
    store.delete(CHAIN_KEY)
    store.delete(TABLE_KEY)
    publish(attach(model, signing_key=key_file), model, 1)
    assert store.get(CHAIN_KEY) != before
    assert Chain.open(store, TRUSTED).read(2).signed_by == (KEY.public.key_id,)


def change(store: MemoryStore, key: str) -> None:
    """Replace the manifest of version 1 by another one with the same commit id."""
    mine = unseal(store.get(key), Manifest, key=key)
    store.put(key, seal(replace(mine, state="0" * 32)))


class DecidingStore(MemoryStore):
    """A store that loses the reply, and has another manifest."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, data)
        if key == manifest_key(1):
            change(self, key)
            raise errors.StoreUnavailableError("the reply was lost", key=key)


class UndecidingStore(SingleWriterStore):
    """A store that is always read back."""

    def put(self, key: str, data: Buffer) -> str:
        pin = super().put(key, data)
        if key == manifest_key(1) and b"0" * 32 not in bytes(data):
            change(self, key)
        return pin


@pytest.mark.parametrize("kind", [DecidingStore, UndecidingStore])
@pytest.mark.parametrize("trust", [OWNER, Trust()])
def test_a_manifest_that_is_read_back_must_have_the_bytes_that_were_put(
    kind: type[MemoryStore], trust: Trust
) -> None:
    store = kind()
    chain = Chain.create(store, TABLE, chain_id="one", time=0.0, assets={}, trust=trust)
    first = chain.commit(manifest_after(None))
    with pytest.raises(errors.DigestMismatchError, match="manifests/"):
        chain.commit(manifest_after(first))
    with pytest.raises(errors.DigestMismatchError):
        chain.settle(manifest_after(first))
