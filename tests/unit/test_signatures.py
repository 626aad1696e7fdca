"""Keys and what they sign: pure functions, without a store."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from msgspec.structs import replace

from deltachain.chain.trust import PublicKey, SigningKey, Trust, TrustedKeys
from deltachain.errors import ConfigError
from deltachain.format.documents import EdgeRecord, Identity, Manifest, Signature

KEY = SigningKey.of(b"\1" * 32)
OTHER = SigningKey.of(b"\2" * 32)
CHAIN = "a" * 32
PAYLOAD = b'{"format":1}'


def signers(
    signatures: list[Signature],
    *,
    kind: type[Manifest | EdgeRecord | Identity] = Manifest,
    chain: str = CHAIN,
    payload: bytes = PAYLOAD,
    keys: tuple[SigningKey, ...] = (KEY,),
) -> tuple[str, ...]:
    trusted = TrustedKeys(tuple(key.public for key in keys))
    return trusted.signers(signatures, kind, chain, payload)


def test_a_signature_counts_for_its_type_chain_payload_and_key_alone() -> None:
    signature = KEY.sign(Manifest, CHAIN, PAYLOAD)
    assert signers([signature]) == (KEY.public.key_id,)
    assert signers([signature], keys=(OTHER, KEY)) == (KEY.public.key_id,)
    assert signers([signature], kind=EdgeRecord) == ()
    assert signers([signature], kind=Identity) == ()
    assert signers([signature], chain="b" * 32) == ()
    assert signers([signature], payload=PAYLOAD + b" ") == ()
    assert signers([signature], keys=(OTHER,)) == ()
    assert signers([replace(signature, key_id=OTHER.public.key_id)], keys=(KEY, OTHER)) == ()
    assert signers([]) == ()


@pytest.mark.parametrize("value", ["", "0" * 127, "0" * 128, "g" * 128, "F" * 128, "0" * 130])
def test_a_value_of_another_form_is_no_signature(value: str) -> None:
    assert signers([replace(KEY.sign(Manifest, CHAIN, PAYLOAD), value=value)]) == ()


def test_several_signatures_may_lie_beside_a_document_but_one_of_each_key_id() -> None:
    true = KEY.sign(Manifest, CHAIN, PAYLOAD)
    both = [OTHER.sign(Manifest, CHAIN, PAYLOAD), true]
    assert signers(both, keys=(KEY, OTHER)) == (KEY.public.key_id, OTHER.public.key_id)
    assert signers([replace(true, value="0" * 128), true]) == ()
    assert signers([true, replace(true, value="0" * 128)]) == (KEY.public.key_id,)


@pytest.mark.parametrize("chain", ["", "a\0b", "a/b", "..", "a\n", "é", "a" * 256])
def test_a_chain_whose_id_is_no_name_is_not_signed(chain: str) -> None:
    with pytest.raises(ConfigError, match="cannot be part of a key"):
        KEY.sign(Manifest, chain, PAYLOAD)
    assert signers([KEY.sign(Manifest, CHAIN, PAYLOAD)], chain=chain) == ()


def test_a_key_is_read_from_the_file_it_was_written_to(tmp_path: Path) -> None:
    file = tmp_path / "key"
    made = SigningKey.generate()
    file.write_bytes(made.pem())
    assert SigningKey.load(file) == made
    assert made.seed.hex() not in repr(made)
    assert PublicKey.parse(str(made.public)) == made.public


def pem(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, password: bytes = b""
) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, encryption)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "expected an unencrypted private key in PEM"),
        (b"\xff" * 64, "expected an unencrypted private key in PEM"),
        (pem(ed25519.Ed25519PrivateKey.generate(), b"secret"), "expected an unencrypted"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "expected a key of ed25519"),
    ],
)
def test_a_file_that_is_no_signing_key_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=why) as caught:
        SigningKey.load(file)
    assert "keygen" in caught.value.hint
    with pytest.raises(ConfigError, match="No such file"):
        SigningKey.load(tmp_path / "none")


def test_trusted_keys_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    keys = (KEY.public, OTHER.public)
    file = tmp_path / "trusted"
    file.write_text(f"# of the trainer\n{KEY.public} since May\n\n{OTHER.public}\n", "utf-8")
    assert TrustedKeys.parse(str(file)).keys == keys
    assert TrustedKeys.parse(f"{KEY.public}, {OTHER.public},{KEY.public}").keys == keys


@pytest.mark.parametrize("text", ["ed25519:00", "ed25519:" + "G" * 64, f"{KEY.public},x", "none"])
def test_trusted_keys_of_another_form_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        TrustedKeys.parse(text)
    file = tmp_path / "trusted"
    file.write_text("# nobody\n", "utf-8")
    with pytest.raises(ConfigError, match="no trusted key"):
        TrustedKeys.parse(str(file))


def test_keys_come_from_the_environment_and_a_writer_trusts_its_own(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY.pem())
    signing = {"DELTACHAIN_SIGNING_KEY": str(file)}
    trusting = {"DELTACHAIN_TRUSTED_KEYS": str(OTHER.public)}
    assert Trust.of_reader(environment=signing) == Trust()
    assert Trust.of_writer(environment={}) == Trust()
    assert Trust.of_reader(environment=trusting) == Trust(trusted=TrustedKeys((OTHER.public,)))
    own = Trust(key=KEY, trusted=TrustedKeys((KEY.public,)))
    assert Trust.of_writer(environment=signing) == Trust.of_writer(file, {}) == own
    both = Trust(key=KEY, trusted=TrustedKeys((KEY.public, OTHER.public)))
    assert Trust.of_writer(environment=signing | trusting) == both
