from __future__ import annotations

import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.fetch import fetch, open_base
from deltachain.errors import ConfigError, ObjectNotFoundError
from deltachain.format.documents import BaseRef
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.testing.models import plain_model


@pytest.mark.parametrize("path", ["a" * 5000, "/not/there", "a\0b", "/dev/null", "/dev/zero"])
def test_a_base_at_a_path_that_can_not_be_is_refused(path: str) -> None:
    # The path is the publisher's: whatever it is, here it is a folder of weights or none.
    with pytest.raises(ConfigError, match=r"base checkpoint|no safetensors"):
        open_base(BaseRef(path=path), None)


def test_a_part_that_is_gone_is_named_with_a_way_out() -> None:
    store = MemoryStore()
    with Publisher(PublishConfig(url=store.url), store=store).attach(plain_model()):
        chain = Chain.open(store)
        head = chain.read(0)
        (part,) = head.manifest.edge.parts
        store.delete(part.key)
        with pytest.raises(
            ObjectNotFoundError, match="restore it, or restart the publisher"
        ) as lost:
            fetch(chain, chain.plan(None, head))
        assert lost.value.key == part.key
