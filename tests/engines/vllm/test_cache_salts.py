"""Salts of vLLM's own requests, which its prefix cache finds blocks by."""

# ruff: noqa: PLC0415 - vLLM is in one environment only
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def made() -> Any:
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def make(salt: str | None = None) -> Any:
        image = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(4, 8))
        return Request(
            *("name", list(range(64)), SamplingParams(max_tokens=1), None),
            mm_features=[image],
            cache_salt=salt,
            block_hasher=get_request_block_hasher(16, sha256),
        )

    return make


def test_requests_share_a_cache_only_from_one_pause_to_the_next(made: Any) -> None:
    from deltachain_vllm.cache_salts import _on_pause, _on_request

    scheduler = SimpleNamespace(waiting=[], pause_state=0, ec_connector=None)

    def queued(salt: str | None = None) -> Any:
        _on_request(lambda scheduler, given: scheduler.waiting.append(given), scheduler, made(salt))
        return scheduler.waiting.pop()

    def keys(request: Any) -> tuple[Any, ...]:
        assert len(request.block_hashes) == 4
        return (*request.block_hashes, request.cache_salt, request.mm_features[0].identifier)

    first, again, own = queued(), queued(), queued("mine")
    assert keys(first) == keys(again)
    assert not set(keys(first)[:5]) & set(keys(own)[:5])
    before = keys(first), keys(own)
    session = queued()
    session.num_computed_tokens = 16
    scheduler.waiting = [again, own, session]
    _on_pause(lambda *_: None, scheduler, 2)  # ``first`` runs
    assert keys(first) == keys(session) == before[0]
    assert not set(keys(first)) & set(keys(again))
    scheduler.waiting = []
    assert keys(again) == keys(queued())
    assert keys(own) == keys(queued("mine"))
    assert not set(keys(own)) & set(before[1])
    _on_pause(lambda *_: None, scheduler, 0)  # the end of a pause
    assert keys(again) == keys(queued())
    other = SimpleNamespace(waiting=[], ec_connector=object())
    _on_request(lambda *_: None, other, request := made())
    assert request.mm_features[0].identifier == "picture"
    assert not set(keys(request)) & set(keys(first))


def test_a_request_without_a_token_starts_again_and_others_have_the_version_of_their_start(
    made: Any,
) -> None:
    from deltachain_vllm.cache_salts import _on_name, _on_pause, _on_request, oldest

    again: list[Any] = []
    scheduler = SimpleNamespace(waiting=[], running=[], requests={}, ec_connector=None)
    scheduler.prev_step_scheduled_req_ids, scheduler.pause_state = {"name"}, 0

    def preempt(request: Any, timestamp: float) -> None:
        assert timestamp > 0
        request.num_computed_tokens = 0
        again.append(request)

    scheduler._preempt_request = preempt
    core: Any = SimpleNamespace(scheduler=scheduler)

    def set_state(scheduler: Any, state: int) -> None:
        scheduler.pause_state = state

    def swap(version: str) -> None:
        _on_pause(set_state, scheduler, 2)
        _on_name(lambda *_: None, core, version)
        _on_pause(set_state, scheduler, 0)

    swap("9")
    told, begun, waits = made(), made(), made()
    for number, request in enumerate((told, begun, waits)):
        _on_request(lambda *_: None, scheduler, request)
        scheduler.requests[number] = request
    told.append_output_token_ids(5)
    told.num_computed_tokens = begun.num_computed_tokens = 16
    scheduler.running, scheduler.waiting = [told, begun], [waits]
    before = begun.cache_salt
    _on_pause(set_state, scheduler, 0)  # it was not paused
    assert again == []
    swap("10")
    assert (again, scheduler.running) == ([begun], [told])
    assert before != begun.cache_salt == waits.cache_salt
    assert scheduler.prev_step_scheduled_req_ids == set()
    assert oldest(core) == "9"
    begun.num_computed_tokens = waits.num_computed_tokens = 16
    del scheduler.requests[0]
    assert oldest(core) == "10"
    scheduler.requests.clear()
    swap("11")
    assert oldest(core) == "11"
