"""Rollouts: games played by the engine with its current policy, as samples for the trainer."""

import asyncio
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import Queue as MPQueue
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from deltachain.control.replica_client import KEEPALIVE_S
from deltachain.retry import Backoff
from examples.demo.online.engine import EngineKind, Sampled, UnlabelledError, sample

GUESS_TOKENS: Final = 6
PAUSES: Final = Backoff(1.0, 1.0)
PATIENCE_S: Final = 120.0


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass
class Played:
    """The tokens of one game."""

    tokens: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reward: float = 0.0

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.drawn += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def say(self, sampled: Sampled) -> None:
        self.tokens += sampled.tokens
        self.drawn += [1] * len(sampled.tokens)
        self.logprobs += sampled.logprobs
        self.versions += sampled.versions

    @property
    def oldest(self) -> int:
        return min(version for version in self.versions if version >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GameTable:
    """Settings of rollouts."""

    engine: str
    kind: EngineKind
    environment: str
    group: int
    at_once: int
    ahead: int
    seed: int
    diary: Path


class GameWorker:
    """Rollout worker in a thread; see :class:`trl.experimental.async_grpo.RolloutWorkerProtocol`.

    Args:
        table: Settings.
        tokenizer: Tokenizer of the policy.
        held: Returns the version published by the last sync.

    Attributes:
        rollout_buffer: Queue of samples for the trainer.
        metrics_queue: Unused queue, required by the protocol.
    """

    def __init__(self, table: GameTable, tokenizer: Tokenizer, held: Callable[[], int]) -> None:
        self.rollout_buffer: queue.Queue[Any] | MPQueue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] | MPQueue[Any] = queue.Queue()
        self._table, self._tokenizer, self._held = table, tokenizer, held
        self._syncs: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._prompts: dict[str, list[int]] = {}
        (self._stop_token,) = tokenizer.encode(" =", add_special_tokens=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="games", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Ignore the trainer's count of syncs: the engine labels tokens with versions."""
        self._syncs[self._held()] = model_version

    def check_health(self, stale_after_s: float) -> None:
        del stale_after_s  # a long outage of a server raises an error by itself
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._play_all())
        except (httpx.HTTPError, UnlabelledError, TimeoutError) as exc:
            self._failure = exc

    async def _play_all(self) -> None:
        table = self._table
        timeout = httpx.Timeout(60.0, connect=5.0)
        limits = httpx.Limits(max_connections=2 * table.at_once, keepalive_expiry=KEEPALIVE_S)
        numbers = itertools.count()
        async with (
            httpx.AsyncClient(
                base_url=table.engine, timeout=timeout, limits=limits, trust_env=False
            ) as engine,
            httpx.AsyncClient(
                base_url=table.environment, timeout=timeout, limits=limits, trust_env=False
            ) as environment,
        ):
            playing: set[asyncio.Task[None]] = set()
            while not self._stop.is_set():
                full = self.rollout_buffer.qsize() >= table.ahead
                if not full and len(playing) * table.group < table.at_once:
                    group = self._play_group(engine, environment, next(numbers))
                    playing.add(asyncio.create_task(group))
                    continue
                if not playing:
                    await asyncio.sleep(0.02)
                    continue
                done, playing = await asyncio.wait(
                    playing, timeout=0.2, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play_group(
        self, engine: httpx.AsyncClient, environment: httpx.AsyncClient, number: int
    ) -> None:
        table = self._table
        seed = table.seed * 1_000_003 + number
        games = [self._until_done(engine, environment, seed, n) for n in range(table.group)]
        played = await asyncio.gather(*games)
        rewards = np.array([game.reward for game in played])
        spread = float(rewards.std())
        for game, advantage in zip(
            played, (rewards - rewards.mean()) / (spread + 1e-4), strict=True
        ):
            self._hand_over(game, float(advantage), spread, number)

    def _hand_over(self, game: Played, advantage: float, spread: float, group: int) -> None:
        sync = max((s for v, s in self._syncs.items() if v <= game.oldest), default=0)
        line = {
            "group": group,
            "reward": game.reward,
            "versions": _runs(game.versions),
            "held": self._held(),
            "text": self._tokenizer.decode(game.tokens),
        }
        with self._table.diary.open("a", encoding="utf-8") as diary:
            diary.write(json.dumps(line) + "\n")
        self.rollout_buffer.put(
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(game.tokens, np.int64),
                completion_mask=np.array(game.drawn, np.int64),
                old_log_probs=np.array(game.logprobs, np.float32),
                advantage=advantage,
                model_version=sync,
                group_id=group,
                metrics={"reward": game.reward, "reward_std": spread},
                enqueued_at=time.time(),
            )
        )

    async def _until_done(
        self, engine: httpx.AsyncClient, environment: httpx.AsyncClient, seed: int, number: int
    ) -> Played:
        end, attempt = time.monotonic() + PATIENCE_S, 0
        while True:
            draw = hash((seed, number, attempt)) & 0x7FFFFFFF
            try:
                game = await self._play(engine, environment, seed, draw)
            except httpx.HTTPError:
                if time.monotonic() > end or self._stop.is_set():
                    raise
                await asyncio.sleep(PAUSES.pause_s(0))
            else:
                if game is not None:
                    return game
            attempt += 1

    async def _play(
        self, engine: httpx.AsyncClient, environment: httpx.AsyncClient, seed: int, draw: int
    ) -> Played | None:
        opened = (await environment.post("/sessions", json={"seed": seed})).raise_for_status()
        session = opened.json()["session"]
        try:
            game, seen = Played(), opened.json()
            game.read(self._encode(seen["observation"]))
            while not seen.get("done"):
                sampled = await sample(
                    engine,
                    self._table.kind,
                    game.tokens,
                    length=GUESS_TOKENS,
                    stop=[self._stop_token],
                    seed=draw + len(game.tokens),
                )
                if not sampled.finished or not sampled.tokens:
                    return None
                game.say(sampled)
                said = [token for token in sampled.tokens if token != self._stop_token]
                word = {"word": self._tokenizer.decode(said)[:64]}
                answer = await environment.post(f"/sessions/{session}/guess", json=word)
                seen = answer.raise_for_status().json()
                rest = seen["observation"]
                if sampled.tokens[-1] == self._stop_token:
                    rest = rest.removeprefix(" =")
                game.read(self._encode(rest))
            game.reward = float(seen["reward"])
            return game
        finally:
            await environment.delete(f"/sessions/{session}")

    def _encode(self, text: str) -> list[int]:
        if text not in self._prompts:
            self._prompts[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._prompts[text]


def _runs(versions: list[int]) -> list[list[int]]:
    drawn = [version for version in versions if version >= 0]
    return [[version, len(list(run))] for version, run in itertools.groupby(drawn)]
