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

    scheduler = SimpleNamespace(waiting=[], ec_connector=None)

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
