"""Plain checkpoints, one a version, as the ``Trainer`` of transformers saves them."""

import re
from collections.abc import Sequence

from deltachain.bridges import files
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects
from deltachain.store import Store


class CheckpointDialect(Dialect):
    def number(self, key: str) -> int | None:
        folder, _, file = key.rpartition("/")
        found = re.fullmatch(r"checkpoint-(\d{1,12})", folder)
        return int(found[1]) if found and files.is_checkpoint_marker(file) else None

    def full(self, number: int, model: HostModel) -> Objects:
        return files.checkpoint(f"checkpoint-{number}", model)

    def delta(self, number: int, model: HostModel, changes: Sequence[ElementChange]) -> Objects:
        del changes
        return self.full(number, model)

    def is_full(self, store: Store, key: str) -> bool:
        del store, key
        return True

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        del before
        return files.read_checkpoint(store, key)
