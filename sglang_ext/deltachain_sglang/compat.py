"""All code that may differ between versions of SGLang."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import psutil  # type: ignore[import-untyped]
import torch
from fastapi import APIRouter
from fastapi.routing import APIRoute

from deltachain.errors import ApplyError, UnsupportedEngineError
from deltachain.replica.engine import age
from deltachain.replica.settings import draft_does

from .table import BALANCED, IN_PLACE, MOVING, OUTLIVING, REPLACING, TABLE

ABORT_LOOK_S: Final = 0.01  # seconds between two checks whether aborted requests have ended
DEAD_LOOK_S: Final = 1.0  # seconds between two looks whether the asked processes live
WEIGHTS: Final = "weights"  # SGLang's tag for weights in requests to release memory
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

ASKED: Final = f"{_UPDATER}.SchedulerWeightUpdaterManager.check_weights"
RELEASED: Final = f"{_UPDATER}.SchedulerWeightUpdaterManager.release_memory_occupation"
PAUSED: Final = f"{_SCHEDULER}.pause_generation"
NAMED: Final = f"{_SCHEDULER}.record_weight_version_change"
QUEUED: Final = f"{_SCHEDULER}._add_request_to_queue"
LOADED: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
TOLD: Final = f"{_TOKENIZER}.update_weights_from_disk"
CHECKED: Final = f"{_TOKENIZER}.check_weights"
SLEPT: Final = f"{_TOKENIZER}.release_memory_occupation"
WOKEN: Final = f"{_TOKENIZER}.resume_memory_occupation"
RUN: Final = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
"""Functions that are hooked, in the schedulers and in the server."""

ENGINE: Final = "sglang.srt.entrypoints.engine.Engine._ensure_event_loop"
"""Last step of the construction of an ``Engine``, which no server takes."""


def check_version(mode: str = "") -> str:
    """Return the version of the installed SGLang, if it has all names that are needed."""
    import sglang

    TABLE.check(sglang.__version__, (mode,))
    return str(sglang.__version__)


def context() -> Any:
    """Return the module with the settings of this process, by getters."""
    from sglang.srt import runtime_context

    return runtime_context


def _messages() -> Any:
    from sglang.srt.managers import io_struct

    return io_struct


def hook(target: str, function: Callable[..., Any]) -> None:
    """Wrap a function in another, as SGLang's plugins do; idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if all(known is not function for _, known, _ in HookRegistry._hooks[target]):
        HookRegistry.register(target, function, HookType.AROUND)


def check_reply(text: str) -> Any:
    return _messages().CheckWeightsReqOutput(success=True, message=text)


def gather(mine: object) -> list[Any]:
    group = context().get_parallel().tp_group
    if group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


def stages() -> int:
    return int(context().get_parallel().pp_size)


def stage() -> int:
    return int(context().get_parallel().pp_rank)


_TAG: Final = 0xDE17A  # of messages between stages, among SGLang's own
_sent: list[Any] = []  # sends under way, with their tensors


def send_back(text: str) -> None:
    """Send a text to the first stage, which receives it by ``receive_back``; do not wait for it."""
    group = context().get_parallel().pp_group
    for work, _ in _sent:
        work.wait()
    body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    parts, to = (torch.tensor([body.numel()]), body), group.ranks[0]
    _sent[:] = [
        (torch.distributed.isend(part, to, group=group.cpu_group, tag=_TAG), part) for part in parts
    ]


def receive_back(count: int) -> list[str]:
    """Wait for the texts that each later stage sent, and return the last one of each."""
    group = context().get_parallel().pp_group

    def receive(source: int) -> str:
        size = torch.zeros(1, dtype=torch.int64)
        torch.distributed.recv(size, source, group=group.cpu_group, tag=_TAG)
        body = torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.recv(body, source, group=group.cpu_group, tag=_TAG)
        return body.numpy().tobytes().decode()

    return [[receive(source) for _ in range(count)][-1] for source in group.ranks[1:]]


@contextmanager
def _grammars_aside(scheduler: Any) -> Iterator[None]:
    """Set aside requests with a grammar in compilation: uncached, but counted as running."""
    grammars = scheduler.grammar_manager
    waiting, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        yield
    finally:
        grammars.grammar_queue = waiting


def can_flush(manager: Any) -> bool:
    """Return whether no request of this scheduler needs its cache."""
    scheduler = manager.scheduler
    with _grammars_aside(scheduler):
        return bool(manager.is_fully_idle(ignore_waiting=scheduler._engine_paused))


def flush(manager: Any) -> None:
    """Drop cached prefixes, without release of device memory and without garbage collection."""
    with _grammars_aside(manager.scheduler):
        manager.flush_cache(empty_cache=False)


def forget_embeddings() -> None:
    """Drop embeddings of images and sounds, which SGLang caches by content alone."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def rest(scheduler: Any) -> None:
    """Tell a paused scheduler's watchdog that it is alive: the watchdog ends hanging schedulers."""
    scheduler.cur_batch_for_debug = None


def credit(scheduler: Any, version: str) -> None:
    """Label the tokens that were computed before a pause, but not yet returned.

    A scheduler computes one step ahead of the tokens that it returns, and would label those that it
    returns after a change of the version with the new one. A request that has computed a part of
    its prompt gets a label without tokens: so its first label is the oldest version in its cache.
    """
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    started = scheduler.chunked_req
    if started is not None and not started.output_ids:
        started.weight_version_events.append(WeightVersionEvent(version, 0))
    for batch, step in getattr(scheduler, "result_queue", ()):
        for request, made in zip(batch.reqs, _made(step, len(batch.reqs)), strict=True):
            if request is scheduler.chunked_req or request.finished():
                continue  # its step generates no token
            events, count = request.weight_version_events, len(request.output_ids)
            if count and events and events[-1].num_output_tokens == count:
                events.pop()
            event = WeightVersionEvent(old_version=version, num_output_tokens=count + made)
            events.append(event)


def _made(step: Any, requests: int) -> list[int]:
    """Return how many tokens a step made for each request: drafts may make it several."""
    if step.accept_lens is None:
        return [1] * requests
    if step.copy_done is not None:
        step.copy_done.synchronize()
    return [int(count) for count in step.accept_lens.tolist()]


def _drafting(manager: Any) -> list[Any]:
    """Return the runners of the models that draft for the one of a scheduler."""
    worker = manager.draft_worker
    return [runner for _, runner in worker.weight_update_runners()] if worker else []


def heads(manager: Any) -> Any:
    """Return the runner of heads that draft and are in the model's checkpoint; ``None`` for others.

    Heads for chosen tokens alone compute with a copy of the model's rows. The map of experts that
    move is the model's alone.
    """
    target = manager.tp_worker.model_runner
    found = [
        runner
        for runner in _drafting(manager)
        if runner.model_config.model_path == target.model_config.model_path
        and type(runner.model) is not type(target.model)
    ]
    chosen = context().get_spec().speculative_token_map
    return found[0] if len(found) == 1 and not chosen and not moves_experts() else None


def draft(manager: Any) -> Any:
    """Return the runner of the one draft that may follow a chain of its own; ``None`` for none."""
    found = _drafting(manager)
    return found[0] if len(found) == 1 and not heads(manager) else None


def drafts(manager: Any) -> str:
    """Return which models draft for a scheduler and what they follow; empty if none does."""
    names = sorted({type(runner.model).__name__ for runner in _drafting(manager)})
    does = draft_does(os.environ, has_heads=bool(names and heads(manager)))
    return f"{', '.join(names)} {does}" if names else ""


def oldest(scheduler: Any) -> str:
    """Return the name of the oldest version whose keys and values running requests hold."""
    running = scheduler.collect_inflight_reqs() | {scheduler.chunked_req}
    events = [one.weight_version_events for one in running if one is not None]
    names = [str(one[0].old_version) for one in events if one]
    return min((*names, named()), key=age)


def kinds(tags: Sequence[str] | None) -> frozenset[str]:
    """Return the kinds of memory that a request names by tags; all if it has no tags."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return frozenset(tags or GPU_MEMORY_ALL_TYPES)


def has_weights(manager: Any) -> bool:
    return WEIGHTS not in manager.offload_tags


def named() -> str:
    return str(context().get_serving().weight_version)


def rank_of() -> int:
    """Return the number of this rank among those of all stages and data-parallel engines."""
    parallel = context().get_parallel()
    group = parallel.tp_group
    # With attention data parallelism all ranks are one group, and dp_rank is that of attention.
    engine = 0 if parallel.attn_dp_enabled else parallel.dp_rank or 0
    stage = engine * parallel.pp_size + parallel.pp_rank
    return int(stage * group.world_size + group.rank_in_group)


def app() -> Any:
    from sglang.srt.entrypoints.http_server import app as found

    return found


def manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def exposure() -> tuple[str, int, str]:
    """Return host and port at which this server listens, and the key of its write routes."""
    found = context().get_serving()
    return found.host, found.port, found.admin_api_key or found.api_key or ""


def serve(router: APIRouter, prefix: str) -> None:
    """Add routes to SGLang's application, with the same key as SGLang's own write routes.

    They are added one by one: SGLang finds a route's requirements only in the application itself.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in router.routes:
        if isinstance(route, APIRoute):
            app().add_api_route(
                prefix + route.path,
                auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint),
                methods=sorted(route.methods or ()),
                responses=route.responses,
                response_class=route.response_class,
                openapi_extra=route.openapi_extra,
                tags=route.tags,
            )


def end_children() -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)


def end(why: SystemExit) -> NoReturn:
    """Exit this server and all of its processes: uvicorn would print the reason as a traceback."""
    end_children()
    logging.shutdown()
    os._exit(why.code if isinstance(why.code, int) else 1)


def front_ends() -> int:
    return int(context().get_serving().tokenizer_worker_num)


def check_layout(mode: str) -> None:
    """Refuse arrangements of ranks, models and caches that one leader cannot update."""
    parallel, memory = context().get_parallel(), context().get_memory()
    if parallel.pp_size > 1 and mode != "abort":
        raise UnsupportedEngineError(
            f"this server has pp_size {parallel.pp_size}, and SGLang's pipeline stages generate "
            f"on in a pause of mode {mode}",
            hint="set DELTACHAIN_PAUSE=abort, which ends running requests",
        )
    if parallel.enable_dp_attention_local_control_broadcast:
        raise UnsupportedEngineError(
            "engines of this server get requests at different steps, and would wait for others",
            hint="start it without --enable-dp-attention-local-control-broadcast",
        )
    check_experts()
    if context().get_disagg().disaggregation_mode != "null":
        raise UnsupportedEngineError(
            "this server has other servers fill its caches, or fills theirs",
            hint="start it without --disaggregation-mode",
        )
    for name in OUTLIVING:
        if getattr(memory, name) and mode != IN_PLACE:
            raise UnsupportedEngineError(
                "cached prefixes of this server would outlive the weights that made them",
                hint=f"start it without --{name.replace('_', '-')}, or DELTACHAIN_PAUSE=in_place",
            )
    if mode == IN_PLACE and context().get_serving().enable_streaming_session:
        raise UnsupportedEngineError(
            "sessions of this server keep keys and values of earlier weights for later requests",
            hint="start it without --enable-streaming-session, or without "
            "DELTACHAIN_PAUSE=in_place",
        )


def check_experts() -> None:
    """Refuse experts that are loaded as they were, or move without a map that can be read."""
    if moves_experts():
        check_version(BALANCED)
    moe = context().get_exec().moe
    for name, usual in REPLACING.items():
        found = getattr(moe, name)
        if found != usual:
            option = f"--{name.replace('_', '-')}"
            raise UnsupportedEngineError(
                f"this server loads experts of a lost rank as it had them at its start ({option} "
                f"{found}), and mixes them with later versions",
                hint=f"start it without {option}",
            )


def moves_experts() -> bool:
    """Return whether experts are copied, moved, or in other slots than in the checkpoint."""
    moe = context().get_exec().moe
    return any(getattr(moe, name) != usual for name, usual in MOVING.items())


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Server:
    """The used methods of a ``TokenizerManager``; call them on its event loop."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._schedulers: list[psutil.Process] | None = None

    async def check_weights(self, action: str) -> list[str]:
        """Return the reply of every data-parallel engine, once if it is that of all."""
        self._manager.auto_create_handle_loop()
        request = _messages().CheckWeightsReqInput(action=action)
        asked = asyncio.ensure_future(self._manager.check_weights_communicator(request))
        while not (await asyncio.wait({asked}, timeout=DEAD_LOOK_S))[0]:
            if self.is_dead():  # SGLang waits for the replies of all engines, and without an end
                asked.cancel()
                raise ApplyError("a process of the engine has ended", hint="restart the server")
        texts = [str(one.message) for one in asked.result()]
        # With attention data parallelism, ranks are one group, and each reply has all of them.
        return list(set(texts)) if context().get_parallel().attn_dp_enabled else texts

    def is_dead(self) -> bool:
        """Return whether a process of the engine has ended, or the server is about to.

        SGLang itself looks once a second, and its ``/health`` waits for an answer meanwhile. With
        data parallelism it looks at the process alone that starts the schedulers.
        """
        watchdog = self._manager._subprocess_watchdog
        processes = watchdog._processes if watchdog is not None else ()
        if self._schedulers is None:  # later there may be other processes, that end unheeded
            below = [one for head in processes for one in psutil.Process(head.pid).children()]
            self._schedulers = [one for one in below if "scheduler" in " ".join(one.cmdline())]
        alive = all(one.is_alive() for one in processes)
        return self._manager.gracefully_exit or not alive or any(map(_has_ended, self._schedulers))

    def is_paused(self) -> bool:
        return bool(self._manager.is_pause)

    async def pause(self, mode: str) -> None:
        """Stop generation.

        SGLang's own ``abort`` aborts requests, and checks whether they have ended, once a second.
        Aborting once is not enough: some requests are not known yet, and some start others.
        """
        manager = self._manager
        if mode != "abort":
            await manager.pause_generation(_messages().PauseGenerationReqInput(mode=mode))
            return
        async with manager.is_pause_cond:
            manager.is_pause = True
            while True:
                manager.abort_request(abort_all=True)
                if not await manager.model_update_lock.is_locked():
                    break
                await asyncio.sleep(ABORT_LOOK_S)

    async def resume(self) -> None:
        request = _messages().ContinueGenerationReqInput(torch_empty_cache=False)
        await self._manager.continue_generation(request)

    async def name(self, version: str) -> None:
        request = _messages().UpdateWeightVersionReqInput(
            new_version=version, abort_all_requests=False
        )
        await self._manager.update_weight_version(request)
