"""Import: versions that another system's trainer writes as files, as versions of a chain.

The trainer step of a version is its number in the files: a restart continues after the head's, from
the bits that the chain has. A version is published once all of its files were read and proven.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from deltachain import errors
from deltachain.bridges.dialect import Dialect, HostModel
from deltachain.chain.chain import Chain, plan_present
from deltachain.chain.fetch import fetching, scratch
from deltachain.checkpoint import Checkpoint, read_assets
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.session import PublishReceipt
from deltachain.store import ObjectInfo, Store, open_store
from deltachain.subscribe.follow_loop import Round, repeat
from deltachain.threads import Closeable
from deltachain.types import Bits

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class _WrittenAnewError(Exception):
    """The files have other weights under the number of the chain's head."""


class Importer(Closeable):
    """Publishes the versions that a store of files has, in the order of their numbers.

    Args:
        files: Store of the files.
        dialect: Their layout.
        config: Settings of the publisher.
        base: Folder of the checkpoint that is number 0, if the files begin with changes.
    """

    def __init__(
        self, files: Store, dialect: Dialect, config: PublishConfig, *, base: Path | None = None
    ) -> None:
        self._files, self._dialect, self._config, self._base = files, dialect, config, base
        self._publisher: Publisher | None = None
        self._before: HostModel | None = None  # what the publisher has published last
        self._sent = HostModel({}, dict[str, Bits]().__getitem__)  # what it publishes next
        self._chain_store = open_store(config.url, config.storage_options)
        self.held: int | None = None  # number of the chain's head
        self._listed: dict[int | None, ObjectInfo] = {}  # markers by number
        self._proven: ObjectInfo | None = None  # marker of what the chain's head has
        self._parted = False  # the files have other weights under that number

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._chain_store.close()

    def versions(self) -> Iterator[PublishReceipt]:
        """Publish all versions that are whole, one after another."""
        while (found := self._next()) is not None:
            try:
                receipt = self._publish(*found)
            except _WrittenAnewError:
                self._parted = True
            else:
                self._parted = False
                yield receipt

    def follow(self, stop: Event, poll_s: float | None = None) -> Iterator[PublishReceipt]:
        """Publish versions as they appear; errors that may pass are logged and tried again."""

        def round_(_: int) -> Round[PublishReceipt]:
            for receipt in self.versions():
                yield receipt
                if stop.is_set():
                    break
            return False

        doing = f"importing {self._files.url}"
        poll_s = poll_s or self._files.capabilities.poll_s
        yield from repeat(round_, stop=stop, poll_s=poll_s, looked=lambda _: None, doing=doing)

    def _head_number(self) -> int | None:
        try:
            head = Chain.open(self._chain_store).head()
        except errors.ObjectNotFoundError:
            return None
        return None if head is None else head.manifest.step

    def _next(self) -> tuple[int, str] | None:
        """Find the next version: the one behind, else the next full one; at first the newest full.

        Raises:
            BrokenChainError: Later versions are there, of another or no version that is held, and
                none of them is full.
            ConfigError: There are changes only, of a base checkpoint that is not given.
        """
        if self._publisher is None:
            self.held = self._head_number()
        self._listed = {self._dialect.number(one.key): one for one in self._files.list()}
        there = {
            number: one.key
            for number, one in self._listed.items()
            if number is not None and (self.held is None or number > self.held)
        }
        if self.held is not None and self.held + 1 in there and not self._parted:
            return self.held + 1, there[self.held + 1]
        is_full = lambda number: self._dialect.is_full(self._files, there[number])  # noqa: E731
        found = next(filter(is_full, sorted(there, reverse=self.held is None)), None)
        if found is not None:
            return found, there[found]
        if self.held is None and self._base is not None:
            self._publish(0, None)
            return self._next()
        if there and self.held is not None:
            lost = self.held if self._parted else self.held + 1
            why = "was written anew, with other weights than the chain's" if self._parted else ""
            raise errors.BrokenChainError(
                f"{self._files.url} has version {min(there)}, and version {lost}, which it builds "
                f"on, {why or 'is missing'}",
                version=lost,
                hint="a full version, once the trainer writes one, is taken instead",
            )
        if there:
            raise errors.ConfigError(
                f"{self._files.url} has changes only, from version {min(there)} on",
                hint="give their base checkpoint with --base",
            )
        return None

    def _read(self, key: str | None, before: HostModel | None) -> HostModel:
        if key is None and self._base is not None:
            base = Checkpoint(self._base)
            return HostModel(base.specs, base.bits)
        key = key or ""
        if before is not None and not self._dialect.is_full(self._files, key):
            self._prove_base(before)
        model = self._dialect.read(self._files, key, before)
        if before is not None:
            before.check_same(model, key)
        return model

    def _prove_base(self, held: HostModel) -> None:
        """Read the held number again if its file may be another, and its changes prove no base."""
        marker = self._listed.get(self.held)
        if self._dialect.proves_base or marker is None or marker == self._proven:
            return
        again = self._dialect.read(self._files, marker.key, held)
        if again.specs != held.specs or any(
            not np.array_equal(again.bits(name), held.bits(name)) for name in held.specs
        ):
            raise _WrittenAnewError
        self._proven = marker

    def _publish(self, number: int, key: str | None) -> PublishReceipt:
        """Publish a version; its tensors are read one after another, all before the commit."""
        try:
            if self._publisher is None and self.held is not None:
                self._attach_head(key)
            self._sent = self._read(key, self._before)
            if self._publisher is not None:
                _prove(self._sent)
            publisher = self._publisher or self._attach(self._sent)
        except errors.MalformedError as exc:
            if exc.hint == exc.default_hint:
                exc.hint = "the file is damaged, or not written whole yet; nothing was published"
            raise
        try:
            receipt = publisher.publish(step=number).result()
        except BaseException:  # the chain knows what was committed after all
            self._publisher = self._before = None
            with suppress(errors.DeltaChainError):
                publisher.close()
            raise
        self.held, self._proven = number, self._listed.get(number)
        return receipt

    def _attach_head(self, key: str | None) -> None:
        """Attach to what the chain has, once the next version is proven to follow it."""
        chain = Chain.open(self._chain_store)
        head, specs = chain.head(), {spec.name: spec for spec in chain.table.specs()}
        if head is None:
            return
        plan = plan_present(chain, None, head)
        with fetching(chain, plan, target=head, base=self._base, room=scratch()) as fetched:
            before = HostModel(specs, lambda name: fetched.read(name).values)
            _prove(self._read(key, before))
            self._attach(before)

    def _attach(self, model: HostModel) -> Publisher:
        self._sent, publisher = model, Publisher(self._config)
        try:
            publisher.attach(self._tensors, assets=self._assets(), alone=True)
        except BaseException:
            publisher.close()
            raise
        self._publisher, self._before = publisher, HostModel(model.specs, publisher.bits)
        return publisher

    def _assets(self) -> dict[str, bytes] | None:
        folder = self._config.assets or self._base
        return read_assets(folder) if folder is not None and folder.is_dir() else None

    def _tensors(self) -> "Iterator[tuple[str, Tensor]]":
        import torch  # noqa: PLC0415 - slow

        from deltachain.torch_names import TORCH_DTYPES  # noqa: PLC0415

        for name, spec in self._sent.specs.items():
            bits = self._sent.bits(name)
            tensor = torch.from_numpy(bits if bits.flags.writeable else bits.copy())
            yield name, tensor.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _prove(model: HostModel) -> None:
    """Read all tensors, so that what is wrong with one is raised before any is published."""
    for name in model.specs:
        model.bits(name)
