"""A backup is restored while followers are ahead: who says what, and the two ways out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.errors import ChainError, DeltaChainError
from deltachain.format.documents import reverted_to
from tests.accidents.case import roll_back
from tests.accidents.oracle import converged
from tests.accidents.scene import Objects, Scene
from tests.support.models import State, plain_model, same, state_digest
from tests.support.values import present
from tests.unit.cli.support import ok

FOLLOWERS = ("dict", "folder")


class Restored:
    """Followers are ahead of a store that was restored to an older version."""

    def __init__(self, url: str, folder: Path) -> None:
        self.scene = scene = Scene(url, folder, versions=12)
        scene.train()
        scene.publish(2)
        for kind in FOLLOWERS:
            scene.follow(kind, kind)
        scene.look()
        self.old, self.backup = scene.head, scene.contents()
        scene.publish(4)
        scene.look()
        self.newer: Objects = scene.contents()
        scene.restore(self.backup)

    def is_noticed(self) -> None:
        """Who is ahead stays where it is and says so; the publisher commits nothing."""
        scene = self.scene
        ahead = [follower.bits() for follower in scene.followers.values()]
        scene.look()
        scene.publish(1)
        for follower, before in zip(scene.followers.values(), ahead, strict=True):
            assert follower.says.startswith("StoreWentBackError")
            assert same(present(follower.bits()), present(before))
        assert scene.trainer.says.startswith("StoreWentBackError")
        assert scene.shelf().head == self.old
        scene.trainer.close()

    def state(self, version: int) -> State:
        return self.scene.history[self.scene.shelf().leaves[version].state]

    def holds(self, state: State) -> bool:
        scene = self.scene
        scene.look()
        assert not list(converged(scene.views(), scene.shelf(), scene.history))
        assert all(not follower.says for follower in scene.followers.values())
        held = [follower.bits() for follower in scene.followers.values()]
        return len(held) == len(FOLLOWERS) and all(bits and same(bits, state) for bits in held)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    (tmp_path / "followers").mkdir()
    made = Restored(str(tmp_path / "store"), tmp_path / "followers")
    yield made
    made.scene.close()


@pytest.mark.full
def test_newer_objects_are_put_back_and_revert_goes_to_the_older_version(
    restored: Restored,
) -> None:
    scene = restored.scene
    restored.is_noticed()
    scene.restore(restored.newer)
    done = ok("revert", scene.url, "--to", restored.old, "--json").document
    assert restored.holds(restored.state(restored.old))
    assert [view.held and view.held.version for view in scene.views()] == [done["version"]] * 2
    with pytest.raises(ChainError, match="was reverted to the state of version"):
        scene.train()  # with what it held before the backup was restored
    assert restored.holds(restored.state(restored.old))
    ok("verify", scene.url)


def test_the_publisher_goes_on_from_the_backup_and_followers_are_rolled_back(
    restored: Restored,
) -> None:
    scene = restored.scene
    restored.is_noticed()
    scene.train()  # with the weights that it had when the store went back
    scene.publish(6)
    scene.look()
    for name in FOLLOWERS:
        assert scene.followers[name].says.startswith("ForkedChainError")
        roll_back(scene, name)
    head = scene.shelf().head
    assert restored.holds(restored.state(head))
    ok("revert", scene.url, "--to", restored.old)
    assert restored.holds(restored.state(restored.old))
    with pytest.raises(DeltaChainError, match="was reverted"):
        scene.train(plain_model(77))
    scene.chain = type(scene.chain).open(scene.store())
    newest = scene.chain.head()
    assert newest is not None
    assert reverted_to(newest.manifest) == restored.old
    assert str(state_digest(scene.chain, restored.state(restored.old))) == newest.manifest.state
    ok("verify", scene.url)
