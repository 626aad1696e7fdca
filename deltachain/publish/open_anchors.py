"""Anchors as safetensors: their store is a checkpoint, which stock libraries load as a folder."""

from functools import partial
from typing import Final

import msgspec

from deltachain.chain.chain import Chain
from deltachain.checkpoint import INDEX_FILE
from deltachain.codec.container import read_header
from deltachain.errors import UnsupportedModelError
from deltachain.format.documents import Edge
from deltachain.publish.model.source import ModelTensors

OF_PARTS: Final = frozenset({"directory", "digest"})
"""Entries of a part that are no tensors (FORMAT.md 3)."""

METADATA: Final = {"format": "pt"}  # of each part, because loaders of checkpoints ask for it


def refuse_parts(source: ModelTensors) -> None:
    """Raise an error if this rank holds parts of tensors: a stock reader takes whole ones."""
    for weight in source.weights:
        places = weight.element_map
        for slot in places.slots:
            if places.all_of(slot.spec) is None:
                raise UnsupportedModelError(
                    f"{slot.spec.name!r}: this rank holds a part of it, and an anchor in "
                    "safetensors has whole tensors",
                    hint="leave anchor_format out; `deltachain export --dialect checkpoint` makes "
                    "checkpoints of any chain",
                )


def name_checkpoint(chain: Chain, anchor: Edge) -> None:
    """Put the files of a checkpoint at the root of the store, its index last (FORMAT.md 1)."""
    store, places = chain.store, dict[str, str]()
    for part in anchor.parts:
        header = read_header(partial(store.get_range, part.key), part.nbytes, key=part.key)
        places |= dict.fromkeys(header.entries.keys() - OF_PARTS, part.key)
    for path, data in chain.assets():
        store.put(path, data)
    size = sum(spec.nbytes for spec in chain.table.specs())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    store.put(INDEX_FILE, msgspec.json.encode(index))
