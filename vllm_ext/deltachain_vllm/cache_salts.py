"""Prefix caches by version: in pause mode ``in_place``, no request reads those of earlier weights.

vLLM finds cached keys and values by a hash of tokens and ``cache_salt``, and outputs of encoders
by an identifier. In the process that schedules, both get a salt that changes with each pause, when
a request is queued and, if it has not started, in a pause. Running requests keep theirs; one
without a token starts again after the pause, so the version of an answer's first token is the
oldest in its cache.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from deltachain.errors import ConfigError
from deltachain.replica.engine import age

from . import IN_PLACE
from .compat import hook, is_hooked

OLDEST: Final = "deltachain_oldest"  # name of the method that an engine's core gets


class Salts:
    """Salts of the requests of one scheduler; a salt is never used again, in no process.

    ``version`` is the name of the version that generates. Each request has that of its salt.
    """

    def __init__(self) -> None:
        self.version = ""
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
    """Hook vLLM's scheduler, and the engine's core that has it; idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    hook(EngineCore, "set_weight_version", _on_name)
    setattr(EngineCore, OLDEST, oldest)
    hook(Scheduler, "add_request", _on_request)
    hook(Scheduler, "set_pause_state", _on_pause)


def oldest(core: Any) -> str:
    """Return the name of the oldest version whose keys and values running requests hold."""
    held = (one for one in core.scheduler.requests.values() if one.num_computed_tokens)
    found = [str(one.deltachain_version) for one in held]
    return min((*found, _salts(core.scheduler).version), key=age)


def check_salted() -> None:
    """Refuse an engine that was created before the pause mode was set: it salts nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not is_hooked(Scheduler.add_request):
        raise ConfigError(
            f"this engine was created before DELTACHAIN_PAUSE={IN_PLACE} was set",
            hint="set it before vLLM is imported",
        )


def _salt(salts: Salts, scheduler: Any, request: Any) -> None:
    request.deltachain_version = salts.version
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
    elif scheduler.pause_state:
        _restart(scheduler)
    return original(scheduler, state)


def _restart(scheduler: Any) -> None:
    """Let requests that have computed a part of their prompt start again, by one version."""
    for request in [one for one in scheduler.running if not one.num_output_tokens]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        _salt(_salts(scheduler), scheduler, request)


def _on_name(original: Callable[..., Any], core: Any, version: str) -> Any:
    salts = _salts(core.scheduler)
    salts.version = version
    for request in core.scheduler.requests.values():
        if not request.num_computed_tokens:
            request.deltachain_version = version
    return original(core, version)
