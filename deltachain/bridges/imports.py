"""Import: versions that another system's trainer writes as files, as versions of a chain.

The trainer step of a version is its number in the files: a restart continues after the head's, from
the bits that the chain has. A version is published once all of its files were read and proven.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from deltachain import errors
from deltachain.bridges.dialect import Dialect, HostModel
from deltachain.bridges.export import HostCopy
from deltachain.checkpoint import Checkpoint, read_assets
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.session import PublishReceipt
from deltachain.store import Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.follow_loop import Round, repeat
from deltachain.threads import Closeable

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


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
        self._model, self.held = self._published()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def versions(self) -> Iterator[PublishReceipt]:
        """Publish all versions that are whole, one after another."""
        while (found := self._next()) is not None:
            number, key = found
            yield self._publish(number, self._read(key))

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

    def _published(self) -> tuple[HostModel | None, int | None]:
        """Return the weights of the chain's head and their number; none without a chain."""
        target = HostCopy()
        try:
            with Subscriber(SubscribeConfig(url=self._config.url), target) as subscriber:
                receipt = subscriber.update()
        except errors.ObjectNotFoundError:
            return None, None
        if receipt is None or receipt.step is None:
            return None, None
        return HostModel(target.specs, {n: target.bits(n) for n in target.specs}), receipt.step

    def _next(self) -> tuple[int, str] | None:
        """Find the next version: the one behind, else the next full one; at first the newest full.

        Raises:
            BrokenChainError: Later versions are there, and none of them is full.
            ConfigError: There are changes only, of a base checkpoint that is not given.
        """
        there = {
            number: key
            for one in self._files.list()
            if (number := self._dialect.number(key := one.key)) is not None
            and (self.held is None or number > self.held)
        }
        if self.held is not None and self.held + 1 in there:
            return self.held + 1, there[self.held + 1]
        is_full = lambda number: self._dialect.is_full(self._files, there[number])  # noqa: E731
        found = next(filter(is_full, sorted(there, reverse=self.held is None)), None)
        if found is not None:
            return found, there[found]
        if self.held is None and self._base is not None:
            self._publish(0, _base_model(self._base))
            return self._next()
        if there and self.held is not None:
            raise errors.BrokenChainError(
                f"{self._files.url} has version {min(there)}, and version {self.held + 1}, which "
                "it builds on, is missing",
                version=self.held + 1,
                hint="a full version, once the trainer writes one, is taken instead",
            )
        if there:
            raise errors.ConfigError(
                f"{self._files.url} has changes only, from version {min(there)} on",
                hint="give their base checkpoint with --base",
            )
        return None

    def _read(self, key: str) -> HostModel:
        try:
            model = self._dialect.read(self._files, key, self._model)
        except errors.MalformedError as exc:
            if exc.hint == errors.MalformedError.default_hint:
                exc.hint = "the file is damaged, or not written whole yet; nothing was published"
            raise
        if self._model is not None:
            self._model.check_same(model, key)
        return model

    def _publish(self, number: int, model: HostModel) -> PublishReceipt:
        before, self._model = self._model, self._model or model
        try:
            if self._publisher is None:
                self._publisher = self._attached()
            self._model = model
            receipt = self._publisher.publish(step=number).result()
        except BaseException:
            self._model = before
            raise
        self.held = number
        return receipt

    def _attached(self) -> Publisher:
        """Attach to what the chain has, so that no version is without its number."""
        publisher = Publisher(self._config)
        try:
            return publisher.attach(self._tensors, assets=self._assets(), alone=True)
        except BaseException:
            publisher.close()
            raise

    def _assets(self) -> dict[str, bytes] | None:
        folder = self._config.assets or self._base
        return read_assets(folder) if folder is not None and folder.is_dir() else None

    def _tensors(self) -> "Iterator[tuple[str, Tensor]]":
        import torch  # noqa: PLC0415 - slow

        from deltachain.torch_names import TORCH_DTYPES  # noqa: PLC0415

        model = self._model or HostModel({}, {})
        for name, spec in model.specs.items():
            tensor = torch.from_numpy(model.bits[name])
            yield name, tensor.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _base_model(folder: Path) -> HostModel:
    found = Checkpoint(folder)
    return HostModel(dict(found.specs), {name: found.bits(name) for name in found.specs})
