"""Spans of a version: one trace from the optimizer's step to the swap in every replica."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from deltachain import tracing
from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.tracing import TRACEPARENT, VersionSpan, without_context
from tests.support.faults import FaultyStore
from tests.support.models import TinyModel, train_

PUBLISH = ["diff", "encode", "commit", "publish"]
APPLY = ["look", "fetch", "stage", "pause", "apply"]


class Spans:
    """What was recorded, oldest end first."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def take(self) -> list[ReadableSpan]:
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found


def names(spans: list[ReadableSpan]) -> list[str]:
    return [span.name.removeprefix("deltachain.") for span in spans]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield Spans(exporter)
    provider.shutdown()


def test_one_trace_leads_from_the_step_to_the_swap(spans: Spans) -> None:
    store, model = MemoryStore(), TinyModel()
    with Publisher(store.url, store=store).attach(model) as publisher:
        spans.take()
        train_(model, 1)
        with trace.get_tracer("trainer").start_as_current_span("step") as step:
            publisher.publish(step=7)
        publisher.flush()
        published = [span for span in spans.take() if span.name != "step"]
        weights = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        Subscriber(store.url, weights, store=store).update()
        applied = spans.take()
    assert (names(published), names(applied)) == (PUBLISH, APPLY)
    *_, publish = published
    *_, apply = applied
    assert publish.parent is not None
    assert publish.parent.span_id == step.get_span_context().span_id
    assert apply.parent is not None
    assert publish.context is not None
    assert apply.parent.span_id == publish.context.span_id
    assert len({span.context.trace_id for span in (*published, *applied) if span.context}) == 1
    assert dict(publish.attributes or {})["deltachain.version"] == 1
    assert dict(apply.attributes or {})["deltachain.step"] == 7
    for one in (published, applied):
        ends = [one[-1].start_time, *(span.end_time for span in one[:-1])]
        assert [span.start_time for span in one[:-1]] == ends[:-1]


def test_a_failed_version_is_an_error_in_its_trace(spans: Spans) -> None:
    store, model = FaultyStore(MemoryStore()), TinyModel()
    config = PublishConfig(url=store.url, on_error="warn")
    with Publisher(config, store=store).attach(model) as publisher:
        spans.take()
        store.down = True
        train_(model, 1)
        publisher.publish(step=1)
        publisher.flush()
        store.down = False
        failed, *_ = [span for span in spans.take() if span.name == "deltachain.publish"]
    assert failed.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("text", ["", "x", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_context_that_means_nothing_begins_a_trace_of_its_own(spans: Spans, text: str) -> None:
    VersionSpan("apply", metadata={TRACEPARENT: text}).end()
    (span,) = spans.take()
    assert span.parent is None


def test_without_an_sdk_nothing_is_written() -> None:
    store, model = MemoryStore(), TinyModel()
    with Publisher(store.url, store=store).attach(model) as publisher:
        train_(model, 1)
        publisher.publish(step=1)
        publisher.flush()
    head = Chain.open(store).head()
    assert head is not None
    assert head.manifest.metadata == {}


def test_without_the_api_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing._api.cache_clear()
    try:
        span = VersionSpan("publish")
        assert span.context == {}
        span.end({"diff": 1.0}, error=DeltaChainError("x"), attributes={"version": 1})
    finally:
        tracing._api.cache_clear()


def test_the_users_metadata_count_and_the_context_can_be_removed(spans: Spans) -> None:
    store, model = MemoryStore(), TinyModel()
    config = PublishConfig(url=store.url, metadata={"run": "7"})
    with Publisher(config, store=store).attach(model) as publisher:
        train_(model, 1)
        publisher.publish(step=1)
        publisher.flush()
    head = Chain.open(store).head()
    assert head is not None
    found = head.manifest.metadata
    assert found.keys() == {"run", TRACEPARENT}
    assert without_context(found) == {"run": "7"}
    assert spans.take()
