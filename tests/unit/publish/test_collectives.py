from __future__ import annotations

import pytest

from deltachain.errors import StoreUnavailableError
from deltachain.publish.ranks.collectives import Collective, Ranks


def test_a_single_rank_gets_its_own_values_and_nothing_is_encoded() -> None:
    value = object()  # which JSON does not have
    with Collective(Ranks.alone(), "topic") as collective:
        assert collective.gather(value, object) == [value]
        assert collective.all_gather(value, object) == [value]
        assert collective.broadcast(value, object) is value


def test_an_error_on_a_single_rank_is_raised_as_it_is() -> None:
    error = StoreUnavailableError("down")
    with pytest.raises(StoreUnavailableError) as raised, Collective(Ranks.alone(), "topic"):
        raise error
    assert raised.value is error
