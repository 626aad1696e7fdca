"""Clients that keep engines busy, and the judge of every answer."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Final

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.format.documents import reverted_to
from deltachain.store import Store
from examples.demo.online.engine import MODEL, EngineKind
from tests.crash.chaos.report import Diary
from tests.crash.chaos.scene import Party
from tests.crash.chaos.trainer import BEGIN, SESSION, file_of
from tests.engines.expected import MARGIN, Judge

STORE_S: Final = 120.0
"""Seconds that a store may be away before a version counts as one that nobody committed."""


class Reference(Judge):
    """Judges tokens by whichever weights it holds at the moment."""

    def hold(self, weights: Path) -> None:
        self._bits = load_file(weights)
        self._model.load_state_dict(self._bits)
        self._is_rounded = False

    def wrong(
        self, prompt: Sequence[int], tokens: Sequence[int], which: Iterable[int]
    ) -> list[int]:
        which = list(which)
        gap = self.gap(prompt, tokens)
        if all(gap[position] <= MARGIN for position in which):
            return []  # no tolerance is smaller
        return super().wrong(prompt, tokens, which)

    def gaps(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, float]:
        if not self._is_rounded:
            self._rounding.load_state_dict(self._bits)
            self._is_rounded = True
            vars(self).pop("_noisy", None)
        return super().gaps(prompt, tokens)

    def gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        logits = self._logits(self._model, prompt, tokens)
        return logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Judgement of one answer."""

    unexplained: str = ""
    told_apart: bool | None = None


class Record:
    """Versions of a chain, and the trainers' bits of each."""

    def __init__(self, store: Store, base: Path, folder: Path, stop: Event) -> None:
        self._store, self._base, self._folder, self._stop = store, base, folder, stop
        self._reference = Reference(base)
        self._chain: Chain | None = None
        self._files: dict[int, Path | None] = {}

    @property
    def chain(self) -> Chain:
        self._chain = self._chain or Chain.open(self._store)
        return self._chain

    def weights_of(self, version: int) -> Path | None:
        if version not in self._files:
            found = self._find(version)
            if found is None:
                return None
            self._files[version] = found
        return self._files[version]

    def judge(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int, str]],
        *,
        thorough: bool,
    ) -> Verdict:
        starts, ends = [start for start, _, _ in spans], [end for _, end, _ in spans]
        if [*starts, len(tokens)] != [0, *ends]:
            return Verdict(unexplained="not every token has a version")
        labels = [label for _, _, label in spans]
        if any(not label.isdecimal() for label in labels):
            return Verdict(unexplained=f"versions are {labels}")
        versions = [int(label) for label in labels]
        for (start, end, _), version in zip(spans, versions, strict=True):
            weights = self.weights_of(version)
            if weights is None:
                return Verdict(unexplained=f"version {version} was never committed")
            self._reference.hold(weights)
            if wrong := self._reference.wrong(prompt, tokens, range(start, end)):
                return Verdict(unexplained=f"tokens {wrong} are not those of version {version}")
        return Verdict(told_apart=self._told_apart(prompt, tokens, versions) if thorough else None)

    def _told_apart(
        self, prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int]
    ) -> bool | None:
        """Whether the version before the first one would have gone on otherwise."""
        before = self.weights_of(versions[0] - 1) if versions and versions[0] else None
        if before is None or not before.exists():
            return None
        self._reference.hold(before)
        gap, margin = self._reference.gaps(prompt, tokens)
        return bool((gap > margin).any())

    def _find(self, version: int) -> Path | None:
        deadline = time.monotonic() + STORE_S
        while True:
            try:
                found = self.chain.find(version)
            except DeltaChainError:
                if time.monotonic() > deadline or self._stop.wait(1.0):
                    raise
                continue
            if found is None:
                return None
            older = reverted_to(found.manifest)
            if older is None and version and found.manifest.state == found.manifest.base_state:
                older = version - 1  # who takes a chain over begins with a version without changes
            if older is not None:
                return self.weights_of(older)
            session = found.manifest.metadata.get(SESSION, "")
            path = self._folder / file_of(session, found.manifest.step)
            return path if path.exists() else self._folder / file_of(session, BEGIN)


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
