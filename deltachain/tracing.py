"""Traces of versions: OpenTelemetry spans, where its API is installed; else nothing.

The publisher's span is the parent of the spans of everybody who applies the version: its context
travels in the manifest's metadata, as W3C Trace Context writes it. Without an SDK that records, no
span is made and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from deltachain.version import __version__

TRACEPARENT: Final = "traceparent"
"""Key of the context in a manifest's metadata."""


class VersionSpan:
    """Span of one party's work on a version, with a child for each phase.

    May be used from any thread.

    Args:
        name: Name of the span, without its prefix.
        metadata: Metadata of a manifest, whose context is the parent; by default the caller's
            current span is.
        start: Beginning in seconds since 1970; now by default.
        records: Whether to make the span; of many ranks, one does.
    """

    def __init__(
        self,
        name: str,
        *,
        metadata: Mapping[str, str] | None = None,
        start: float | None = None,
        records: bool = True,
    ) -> None:
        self._api = _api() if records else None
        self._start = time.time() if start is None else start
        if self._api is not None:
            parent = None if metadata is None else self._api.extract(metadata)
            self._span = self._api.start(name, parent, self._start)

    @property
    def context(self) -> dict[str, str]:
        """Metadata that makes spans of other parties children of this one; empty if unrecorded."""
        if self._api is None or not self._span.is_recording():
            return {}
        return self._api.inject(self._span)

    def end(
        self,
        phases: Mapping[str, float] = MappingProxyType({}),
        *,
        error: BaseException | None = None,
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """End the span now.

        Args:
            phases: Seconds of each phase by name, one after another from the beginning on.
            error: Why the work failed, if it did.
            attributes: Attributes of the span, without their prefix.
        """
        if self._api is None:
            return
        begun = self._start
        for name, seconds in phases.items():
            inside = self._api.trace.set_span_in_context(self._span)
            self._api.start(name, inside, begun).end(_ns(begun + seconds))
            begun += seconds
        for name, value in attributes.items():
            self._span.set_attribute(f"deltachain.{name}", value)
        if error is not None:
            self._span.set_status(self._api.trace.StatusCode.ERROR, str(error))
        self._span.end()


UNTRACED: Final = VersionSpan("untraced", records=False)
"""The span of work that is not traced."""


def without_context(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a manifest without the context of its trace."""
    return {key: value for key, value in metadata.items() if key != TRACEPARENT}


class _Api:
    """The parts of OpenTelemetry's API that are used."""

    def __init__(self) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - an extra
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self.trace = trace
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, parent: Any, begun: float) -> Any:  # noqa: ANN401 - OpenTelemetry's
        tracer = self.trace.get_tracer("deltachain", __version__)
        return tracer.start_span(f"deltachain.{name}", context=parent, start_time=_ns(begun))

    def extract(self, metadata: Mapping[str, str]) -> Any:  # noqa: ANN401
        """Return the context in a manifest's metadata; an empty one if there is no valid one."""
        from opentelemetry.context import Context  # noqa: PLC0415

        carrier = {TRACEPARENT: metadata.get(TRACEPARENT, "")}
        return self._propagator.extract(carrier, Context())

    def inject(self, span: Any) -> dict[str, str]:  # noqa: ANN401
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.trace.set_span_in_context(span))
        return {TRACEPARENT: carrier[TRACEPARENT]} if TRACEPARENT in carrier else {}


@lru_cache(maxsize=1)
def _api() -> _Api | None:
    try:
        return _Api()
    except ImportError:
        return None


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
