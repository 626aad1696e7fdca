"""Tag records are written as they were, and read from FORMAT.md alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deltachain.chain import tags
from deltachain.format import keys
from deltachain.format.documents import Tag, dump, parse, seal, unseal
from tests.format import freeze, freeze_tags, stranger_tags
from tests.format.forge import no_documents
from tests.format.stranger_base import RefusedError

FILES = {
    str(file.relative_to(freeze_tags.FOLDER)): file.read_bytes()
    for file in sorted(freeze_tags.FOLDER.rglob("*"))
    if file.is_file()
}


def get(key: str) -> bytes | None:
    file = freeze.FOLDER / "chain" / key
    return FILES.get(key) or (file.read_bytes() if file.is_file() else None)


def test_the_frozen_records_are_written_again_and_read() -> None:
    assert len(FILES) == 4
    assert freeze_tags.build() == FILES
    chain = freeze_tags.chain()
    for key, data in FILES.items():
        chain.store.put(key, data)
    best = tags.read(chain, "best")
    assert best is not None
    assert (best.version, best.number, best.state) == (3, 1, chain.read(3).manifest.state)
    assert tags.committed(chain, best).version == 3
    assert tags.read(chain, "eval-step-10") is None
    assert tags.read_all(chain) == (best,)


def test_a_stranger_finds_the_same() -> None:
    tree = ast.parse(Path(str(stranger_tags.__file__)).read_text(encoding="utf-8"))
    modules = {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if not m.startswith("tests.format.stranger")} == {
        "__future__",
        "typing",
    }
    assert stranger_tags.tagged(get, "best") == 3
    assert stranger_tags.tagged(get, "eval-step-10") is None
    assert stranger_tags.tagged(get, "other") is None


@pytest.mark.parametrize("at", [20, 120, 300, -20])
def test_a_record_with_one_byte_changed_is_refused(at: int) -> None:
    data = bytearray(FILES[keys.tag_key("best", 1)])
    data[at] ^= 1

    def changed(key: str) -> bytes | None:
        return bytes(data) if key == keys.tag_key("best", 1) else get(key)

    with pytest.raises(RefusedError):
        stranger_tags.tagged(changed, "best")
    with pytest.raises(Exception, match="tags/best"):
        unseal(bytes(data), Tag, key="tags/best/00000001.json")


@pytest.mark.parametrize("name", sorted(no_documents(b'{"ext":{},"format":1}')))
def test_what_is_no_document_is_no_record(name: str) -> None:
    data = dump(unseal(FILES[keys.tag_key("best", 1)], Tag, key="k"))
    with pytest.raises(Exception, match="k: "):
        parse(no_documents(data)[name], Tag, key="k")


def test_a_record_of_another_name_is_refused_by_both() -> None:
    record = unseal(FILES[keys.tag_key("best", 1)], Tag, key="k")
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    for other in ({"name": "worst"}, {"number": 0}, {"chain": "x"}, {"manifest": "0" * 64}):
        data = seal(Tag(**fields | other))

        def changed(key: str, data: bytes = data) -> bytes | None:
            return data if key == keys.tag_key("best", 1) else get(key)

        with pytest.raises(RefusedError):
            stranger_tags.tagged(changed, "best")
