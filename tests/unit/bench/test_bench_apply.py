import numpy as np
import pytest

from tests.bench.apply import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene.generate(tensors=2, numel=1 << 13, density=0.02)


def test_a_swap_and_its_undo_are_exact(scene: Scene) -> None:
    patches = scene.check()
    assert sum(patch.nnz for patch in patches) == scene.nnz
    assert all(np.array_equal(t.bits[t.indices], t.old) for t in scene.tensors)
    scene.put_new()
    assert all(np.array_equal(t.bits[t.indices], t.new) for t in scene.tensors)


def test_staging_from_another_base_is_refused(scene: Scene) -> None:
    scene.tensors[0].bits[scene.tensors[0].indices[0]] ^= 1
    with pytest.raises(ArithmeticError, match="digest"):
        scene.stage()
