"""Prefix caches by version: in pause mode ``in_place``, no request reads those of earlier weights.

vLLM finds cached keys and values by a hash of tokens and ``cache_salt``, and outputs of encoders
by an identifier. In the process that schedules, both get a salt that changes with each pause, when
a request is queued and, if it has not started, in a pause. Running requests keep theirs.
"""

import secrets
from collections.abc import Callable
from typing import Any, Final

from deltachain.errors import ConfigError

from . import IN_PLACE
from .compat import hook, is_hooked


class Salts:
    """Salts of the requests of one scheduler; a salt is never used again, in no process."""

    def __init__(self) -> None:
        self._process: Final = secrets.token_hex(8)
        self._pauses = 0

    def renew(self, scheduler: Any) -> None:
        """Give requests that have not started a new salt."""
        self._pauses += 1
        for request in scheduler.waiting:
            if not request.num_computed_tokens:  # a session that waits for more input has some
                _salt(self, scheduler, request)

    def joined(self, given: str) -> str:
        """Join the salt of now and a caller's."""
        if given.startswith(self._process):
            given = given.partition("/")[2]
        return f"{self._process}.{self._pauses}/{given}"


def salt_requests() -> None:
    """Hook vLLM's scheduler; idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    hook(Scheduler, "add_request", _on_request)
    hook(Scheduler, "set_pause_state", _on_pause)


def check_salted() -> None:
    """Refuse an engine that was created before the pause mode was set: it salts nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not is_hooked(Scheduler.add_request):
        raise ConfigError(
            f"this engine was created before DELTACHAIN_PAUSE={IN_PLACE} was set",
            hint="set it before vLLM is imported",
        )


def _salt(salts: Salts, scheduler: Any, request: Any) -> None:
    request.cache_salt = salts.joined(request.cache_salt or "")
    if scheduler.ec_connector is None:  # else an encoder elsewhere names its outputs
        for feature in request.mm_features:
            feature.identifier = salts.joined(feature.identifier)
    request.block_hashes.clear()
    request.update_block_hashes()


def _salts(scheduler: Any) -> Salts:
    if not hasattr(scheduler, "deltachain_salts"):
        scheduler.deltachain_salts = Salts()
    found: Salts = scheduler.deltachain_salts
    return found


def _on_request(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    _salt(_salts(scheduler), scheduler, request)
    return original(scheduler, request)


def _on_pause(original: Callable[..., Any], scheduler: Any, state: Any) -> Any:
    if state:  # any but UNPAUSED
        _salts(scheduler).renew(scheduler)
    return original(scheduler, state)
