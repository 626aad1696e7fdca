"""A publisher that maintains its chain itself."""

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.format.keys import edge_key
from deltachain.maintain import KeepRule, Maintainer, MaintainerThread
from deltachain.maintain.survey import Survey
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.support.models import bits_of, plain_model, same, tensors_of, train_
from tests.support.values import eventually


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long between two rounds."""
    monkeypatch.setitem(MaintainerThread.__init__.__kwdefaults__ or {}, "every_s", 0.05)


def wait_for_anchor(folder: Path, version: int) -> None:
    store = open_store(str(folder))
    eventually(lambda: store.find(edge_key(version, "anchor", None)) is not None)


@pytest.mark.full
@pytest.mark.parametrize("maintain", [True, KeepRule(last=40)])
def test_skips_and_anchors_come_from_its_thread(
    tmp_path: Path,
    maintain: bool | KeepRule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first round finds no memory, which the next ones find."""
    round_ = Maintainer.round

    def without_memory(_: Maintainer) -> None:
        monkeypatch.setattr(Maintainer, "round", round_)
        raise MemoryError

    monkeypatch.setattr(Maintainer, "round", without_memory)
    model = plain_model()
    config = PublishConfig(url=str(tmp_path), maintain=maintain, anchor_every=64)
    with Publisher(config).attach(model) as publisher:
        for step in range(140):
            train_(model, step, share=0.02)
            publisher.publish(step=step)
            publisher.flush()
            if step in (70, 139):  # its thread may be slow, and then anchors the newest alone
                wait_for_anchor(tmp_path, 64 if step == 70 else 128)
    chain = Chain.open(open_store(str(tmp_path)))
    head = chain.head()
    assert head is not None
    edges = Survey(chain).edges(head)
    assert {edge.version for edge in edges if edge.base is None} == {0, 64, 128}
    assert sum(edge.kind == "skip" for edge in edges) > 5
    listed = [edge.version for edge in head.manifest.recent if edge.base is None]
    assert listed[-1] >= 64  # it lists what its thread added
    assert (chain.prunes.newest() is not None) == isinstance(maintain, KeepRule)
    tensors = tensors_of(plain_model(1))
    with Subscriber(str(tmp_path), tensors) as subscriber:
        subscriber.update()
    assert same(bits_of(tensors), bits_of(model))
    assert caplog.text.count("maintenance failed, the next round tries again: MemoryError()") == 1
