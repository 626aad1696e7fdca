"""Clients that keep engines busy, and the judge of every answer."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Final

import httpx
import torch

from examples.demo.online.engine import MODEL, EngineKind
from tests.crash.chaos.diary import Diary
from tests.crash.chaos.record import Record, Verdict
from tests.crash.chaos.scene import Party

PAUSE_S: Final = 1.0

TIMEOUT_S: Final = 60.0
VOCABULARY: Final = range(3, 500)
KNOWN: Final = 8
"""Prompts that come again and again: what is cached of them must not outlive a version."""

KNOWN_LENGTH: Final = 160
"""Tokens of each; vLLM caches whole blocks of 128 on a CPU."""

FRESH_LENGTH: Final = 12

LENGTHS: Final = (8, 24, 48)
THOROUGH: Final = 5
"""Of so many answers one is also held against the version before."""


class Load:
    def __init__(
        self, engines: Sequence[Party], record: Record, diary: Diary, stop: Event, name: str
    ) -> None:
        self._record, self._diary, self._stop, self._name = record, diary, stop, name
        self._answers: Queue[dict[str, Any]] = Queue()
        for answer in unjudged(diary):
            self._answers.put(answer)
        dice = random.Random(f"{name} load")
        self._known = [dice.choices(VOCABULARY, k=KNOWN_LENGTH) for _ in range(KNOWN)]
        self._judge_thread = Thread(target=self._judge_all, name="judge")
        self._clients = [
            Thread(target=self._ask, args=(one, random.Random(f"{name} {one.kind}")))
            for one in engines
        ]

    def start(self) -> None:
        for thread in (self._judge_thread, *self._clients):
            thread.start()

    def join(self) -> None:
        for thread in self._clients:
            thread.join()
        self._judge_thread.join()

    def _ask(self, engine: Party, dice: random.Random) -> None:
        with httpx.Client(base_url=engine.url, timeout=TIMEOUT_S, trust_env=False) as client:
            for number in count():
                if self._stop.wait(PAUSE_S):
                    return
                fresh = dice.choices(VOCABULARY, k=FRESH_LENGTH)
                prompt = fresh if dice.random() < 0.5 else dice.choice(self._known)
                length, asked = dice.choice(LENGTHS), time.time()
                try:
                    found = ask(client, engine.kind, prompt, length)
                except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                    self._diary.note("refused", engine=engine.kind, asked=asked, why=repr(error))
                else:
                    one = f"{self._name} {engine.kind} {number}"
                    answer = {"name": one, "engine": engine.kind, "asked": asked, **found}
                    self._diary.note("answer", **answer)
                    self._answers.put(answer)

    def _judge_all(self) -> None:
        torch.set_num_threads(1)  # of this thread: a second one would wait for a busy core
        number = 0
        while not (self._stop.is_set() and self._answers.empty() and not self._is_asking()):
            try:
                answer = self._answers.get(timeout=0.5)
            except Empty:
                continue
            number += 1
            verdict = self._judge(answer, thorough=number % THOROUGH == 0)
            self._diary.note(
                "verdict",
                name=answer["name"],
                engine=answer["engine"],
                unexplained=verdict.unexplained,
                told_apart=verdict.told_apart,
                waiting=self._answers.qsize(),
            )

    def _is_asking(self) -> bool:
        return any(thread.is_alive() for thread in self._clients)

    def _judge(self, answer: dict[str, Any], *, thorough: bool) -> Verdict:
        try:
            return self._record.judge(
                answer["prompt"], answer["tokens"], answer["spans"], thorough=thorough
            )
        except Exception as error:  # noqa: BLE001 - what cannot be judged is not explained
            return Verdict(unexplained=f"cannot be judged: {error!r}")


def unjudged(diary: Diary) -> list[dict[str, Any]]:
    answers = {one["name"]: one for one in diary.events("answer")}
    for one in diary.events("verdict"):
        answers.pop(one["name"], None)
    return list(answers.values())


def ask(
    client: httpx.Client, kind: EngineKind, prompt: Sequence[int], length: int
) -> dict[str, Any]:
    if kind == "vllm":
        sampling = {"temperature": 0, "max_tokens": length, "ignore_eos": True}
        body = {"model": MODEL, "token_ids": list(prompt), "sampling_params": sampling}
        answer = client.post("/inference/v1/generate", json=body).raise_for_status().json()
        (choice,) = answer["choices"]
        tokens, spans = choice["token_ids"] or [], choice["weight_versions"] or []
        finish = choice["finish_reason"]
    else:
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        answer = client.post("/generate", json=body).raise_for_status().json()
        tokens, meta = answer["output_ids"], answer["meta_info"]
        spans, finish = meta["weight_versions"], meta["finish_reason"]["type"]
    return {
        "prompt": list(prompt),
        "tokens": tokens,
        "spans": [(span["start"], span["end"], str(span["version"])) for span in spans],
        "finish": finish,
        "answered": round(time.time(), 3),
    }
