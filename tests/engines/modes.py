"""The modes of an engine: each server is started, follows, goes back, is killed, and starts again.

::

    python -m tests.engines.modes                   # rows that were not run or wrong; the table
    python -m tests.engines.modes --rows NAME ...   # these, again; with --versions 30 for longer
    python -m tests.engines.modes --rows --write    # none; the table into the engine's README

Rows, logs and checkpoints are kept in the folder ``modes``; rows that a README alone has, in it.
"""

import argparse
import json
import random
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from examples.demo.online.processes import free_port
from tests.engines import strikes
from tests.engines.expected import Judge
from tests.engines.replica import Replica, error_of
from tests.engines.serving import ENGINE, HOST, ROOT, STOP_S, Server, answers, prompt, start
from tests.engines.test_nodes import ADDRESS, HEADLESS, SILENT_S, second_node
from tests.engines.test_server_load import STALE, Trial, checked
from tests.engines.test_server_outages import PLAIN, with_heads
from tests.engines.test_server_stages import EXPERTS, STAGES
from tests.engines.trainer import Trainer

VERSIONS: Final = 3
COLUMNS: Final = ("follow", "rollback", "kill -9, restart", "push", "wrong tokens")
KEPT: Final = ROOT / "modes" / ENGINE
README: Final = ROOT / f"{ENGINE}_ext" / "README.md"
DEAD: Final = {"vllm": "EngineDeadError"}.get(ENGINE, "Scheduler hit an exception")
ENDS_S: Final = 90.0
"""Seconds within which servers end whose experts are lost."""

LONGEST: Final = 180
"""Characters of what an engine says in a table."""

TABLE: Final = re.compile(r"(?s)<!-- modes (\S+) -->\n\n(.*?)\n\n<!-- end -->")
"""The table in a README, and the version of the engine in rows that name none."""

AT: Final = version(ENGINE).partition("+")[0]


class Headed:
    """A trainer whose checkpoints have a head for later tokens, another one in each version."""

    def __init__(self, folder: Path) -> None:
        self._trainer, self._folder, self.head = Trainer(folder, family=PLAIN[ENGINE]), folder, 0
        self.url = (folder / "with_heads").as_uri()
        self.base = self._pushed(0)

    def __enter__(self) -> "Headed":
        return self

    def __exit__(self, *why: Any) -> None:
        self._trainer.__exit__(*why)

    def _pushed(self, version: int) -> Path:
        made = with_heads(self._trainer.pulled(version), self.pulled(version), version)
        push(open_store(self.url), made, PublishConfig(url=self.url))
        return made

    def step(self) -> int:
        self.head = self._trainer.step()
        self._pushed(self.head)
        return self.head

    def pulled(self, version: int, *, near: bool = False) -> Path:
        del near
        return self._folder / f"headed-{version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How the servers of a row are started; ``PORT``, ``ADAPTER``, ``BASE`` stand for values."""

    arguments: tuple[str, ...] = ()
    each: tuple[tuple[str, ...], ...] = ((),)  # more of each server, which balance among them
    nodes: tuple[tuple[str, ...], ...] = ((),)  # more of each node; only the first has an address
    environment: Mapping[str, str] = field(default_factory=dict)
    make: Callable[[Path], Any] = Trainer
    tp: int = 1
    dp: int = 1
    last: int | None = None  # number of the rank that is killed, if not that of tp and dp
    joint: bool = False  # its servers end as one
    plain: bool = True  # linears as on an accelerator
    fresh: str = ""  # what is compared with a fresh load: "tokens", "bits"; else a judge knows
    program: str = ""  # module that is run in place of the server's, with its arguments
    first: Path = ROOT  # the first folder of modules
    act: Callable[[Replica], None] = lambda _: None

    @property
    def pause(self) -> str:
        return self.environment.get("DELTACHAIN_PAUSE", "")


def adapter(base: Path, folder: Path) -> Path:
    """Make a LoRA adapter of random weights, as PEFT would save it."""
    folder.mkdir()
    dice, made = torch.Generator().manual_seed(5), {}
    for name, weight in load_file(base / WEIGHTS_FILE).items():
        if name.split(".")[-2] in ("q_proj", "v_proj", "down_proj"):
            for side, shape in (("A", (8, weight.shape[1])), ("B", (weight.shape[0], 8))):
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"
                made[key] = torch.randn(shape, generator=dice) * 0.1
    save_file(made, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 4, "bias": "none"}
    said |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "base_model_name_or_path": ""}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(base: Path, added: Path, folder: Path) -> Path:
    """Make the checkpoint, in fp32, that a base with an adapter is."""
    shutil.copytree(base, folder)
    weights = {name: bits.float() for name, bits in load_file(base / WEIGHTS_FILE).items()}
    pairs = load_file(added / "adapter_model.safetensors")
    for key in [key for key in pairs if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[name] += 0.5 * pairs[key.replace("lora_A", "lora_B")] @ pairs[key]
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def adapts(replica: Replica) -> None:
    """Assert that requests with an adapter get the tokens of the newest base with it."""
    head, folder = replica.trainer.head, replica.trainer.base.parent
    judge = Judge(merged(replica.trainer.pulled(head), folder / "adapter", folder / "merged"))
    plain, gaps = Judge(replica.trainer.pulled(head)), []
    for first in range(5, 13):
        answer = replica.server.generate([first, 6, 7], 24, "policy")
        assert len(answer.tokens) == 24, answer
        assert judge.wrong(answer.prompt, answer.tokens, range(24)) == [], judge.gaps(
            answer.prompt, answer.tokens
        )
        gaps += plain.wrong(answer.prompt, answer.tokens, range(24))
    assert gaps, "the adapter changes no token"


def sleeps(replica: Replica, levels: str) -> None:
    """Assert that it wakes at the version that was committed while it slept."""
    server: Any = replica.server
    for level in levels:
        server.sleep(*([level] if ENGINE == "vllm" else []))
        assert server.get("ready").status_code == 503
        new = replica.trainer.step()
        refused = server.post("update")
        assert "released its weights" in error_of(refused, refused.status_code)["message"]
        if level != "1":
            server.reset()  # memory on an accelerator comes back with anything in it
        server.wake()
        server.wait_for(lambda status, new=new: status["version"] == new)
        assert replica.goes_on_as(new)


def keyed(replica: Replica) -> None:
    """Assert that prefixes under a caller's own key are found by requests of the same version."""
    server: Any = replica.server
    asked, cached = prompt(random.Random(7), 400), []
    for _ in range(VERSIONS):
        new = replica.trainer.step()
        server.wait_for(lambda status, new=new: status["version"] == new)
        for _ in range(2):
            sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            body = {"input_ids": asked, "sampling_params": sampling, "extra_key": "mine"}
            found = server.client.post("/generate", json=body).json()
            cached.append(found["meta_info"]["cached_tokens"] > 0)
            tokens = tuple(found["output_ids"])
            assert replica.judge(new).wrong(tuple(asked), tokens, range(24)) == []
    assert cached == [False, True] * VERSIONS, cached


def beside(replica: Replica) -> None:
    """Assert that another plugin, around functions of ours, is called and harms nothing."""
    sleeps(replica, "2")
    log = replica.server.log()
    for called in ("load_model", "pause_generation", "release_memory_occupation"):
        assert re.search(rf"another plugin saw \S+\.{called}\b", log), called


def all_at_once(replica: Replica) -> None:
    """Assert what LoRA, an extension of the user and sleep do in one server of vLLM."""
    adapts(replica)
    answer = replica.server.client.post("/collective_rpc", json={"method": "own_answer"})
    assert answer.json()["results"] == ["42"], answer.text
    sleeps(replica, "12")


def tells_draft(replica: Replica, does: str) -> None:
    drafts = [rank["draft"] for rank in replica.server.status()["ranks"]]
    assert all(draft.endswith(f" {does}") for draft in drafts), drafts


def drafts_as_the_model(replica: Replica) -> None:
    """Assert that a draft on the chain of the model drafts its tokens."""
    tells_draft(replica, "follows its own chain")
    server: Any = replica.server
    found = server.wait_for(lambda status: status["draft"]["version"] == status["version"])
    assert not found["draft"]["trouble"], found
    assert server.post("scrub").status_code == 200
    assert server.drafted() > ALIKE


def engines(size: int, local: int) -> tuple[str, ...]:
    """Arguments of vLLM for some of all data-parallel engines."""
    shared = ("--data-parallel-address", HOST, "--data-parallel-rpc-port", "PORT")
    return *shared, "--data-parallel-size", str(size), "--data-parallel-size-local", str(local)


def balanced(option: str, each: str, size: int, local: int, **more: Any) -> Mode:
    """Servers of vLLM with some engines each, which something else balances among."""
    first = tuple((each, str(number)) for number in range(0, size, local))
    shown = {"arguments": (*engines(size, local), option), "each": first, "last": local - 1}
    return Mode(**{**shown, **more})


def speculating(**how: Any) -> tuple[str, ...]:
    return "--speculative-config", json.dumps(how)


TOGETHER: Final = {"DELTACHAIN_TOGETHER": "policy@2", "DELTACHAIN_PRESENCE_URL": "MEETING"}
OWN_CHAIN: Final = {"DELTACHAIN_DRAFT_URL": "STORE"}
HYBRID: Final = ("--data-parallel-hybrid-lb", "--data-parallel-start-rank")
EXTERNAL: Final = ("--data-parallel-external-lb", "--data-parallel-rank")
NODES: Final = ("--nnodes", "2", *ADDRESS, "PORT" if ENGINE == "vllm" else f"{HOST}:PORT")
RANKS: Final = (("--node-rank", "0"), ("--node-rank", "1", *HEADLESS))
MOE: Final = partial(Trainer, family="qwen3_moe", steps=4)
LLAMA: Final = partial(Trainer, family="llama", steps=2)
LORA: Final = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "policy=ADAPTER")
# Drafts of SGLang need its attention for AMX, which the tests have in torch, and more memory.
AMX: Final = (
    *("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"),
    *("--mem-fraction-static", "0.95", "--speculative-num-draft-tokens", "2"),
)
EAGLE: Final = ("--speculative-num-steps", "1", "--speculative-eagle-topk", "1", *AMX)
DRAFT: Final = ("--speculative-draft-model-path", "BASE")
ALIKE: Final = 0.9
"""Least share of drafted tokens that a model accepts of itself; rounding decides some."""

SLOTS: Final = json.dumps({"physical_to_logical_map": [[2, 0, 3, 1, 1, 2], [3, 2, 1, 0, 0, 3]]})
"""Experts of the two layers of ``MOE`` in SGLang's slots, some of them twice."""
BALANCE: Final = ("--eplb-rebalance-num-iterations", "50")  # steps between two moves
OWN: Final = Path(__file__).parent / "sglang"
COMMON: Final = {
    "tensor parallel": Mode(tp=2),
    "data parallel": Mode(dp=2),
    "pipeline": Mode(last=1, **STAGES.get(ENGINE, {})),
    "pipeline, tensor parallel": Mode(tp=2, last=3, **STAGES.get(ENGINE, {})),
    "expert parallel": Mode(tp=2, make=MOE, **EXPERTS.get(ENGINE, {})),
    "two nodes": Mode(tp=2, nodes=RANKS, arguments=NODES),
    "two servers, `DELTACHAIN_TOGETHER`": Mode(each=((), ()), environment=TOGETHER),
    "`in_place` caches": Mode(environment={"DELTACHAIN_PAUSE": STALE}),
}
MODES: Final[Mapping[str, Mapping[str, Mode]]] = {
    "vllm": {
        **COMMON,
        "`--api-server-count 2`": Mode(dp=2, arguments=("--api-server-count", "2")),
        "data parallel, experts": Mode(dp=2, make=MOE),
        "data parallel, two nodes": Mode(
            nodes=((), ("--data-parallel-start-rank", "1", *HEADLESS)),
            arguments=engines(2, 1),
            last=1,
        ),
        "hybrid, two engines each": balanced(*HYBRID, 4, 2),
        "hybrid, one engine each": balanced(*HYBRID, 2, 1, environment=TOGETHER),
        "external": balanced(*EXTERNAL, 2, 1),
        "external, experts": balanced(*EXTERNAL, 2, 1, make=MOE, last=1, joint=True),
        "drafts: ngram": Mode(
            arguments=speculating(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
        ),
        "drafts: MTP head in the chain": Mode(
            arguments=speculating(method="mtp", num_speculative_tokens=1),
            make=Headed,
            act=partial(tells_draft, does="follows the chain"),
        ),
        "drafts: a model": Mode(
            arguments=speculating(method="draft_model", model="BASE", num_speculative_tokens=2),
            act=partial(tells_draft, does="keeps its weights"),
        ),
        "drafts: a model, `DELTACHAIN_DRAFT_URL`": Mode(
            arguments=speculating(method="draft_model", model="BASE", num_speculative_tokens=2),
            environment=OWN_CHAIN,
            act=drafts_as_the_model,
        ),
        "`--enable-eplb`": Mode(
            tp=2, make=MOE, arguments=("--enable-expert-parallel", "--enable-eplb")
        ),
        "`AsyncLLM` in process": Mode(program="tests.engines.vllm.in_process"),
        "LoRA, own extension, sleep levels 1 and 2": Mode(arguments=LORA, act=all_at_once),
        "extension, no subclass": Mode(arguments=("--worker-extension-cls", "string.Formatter")),
        "`--quantization fp8_per_channel`": Mode(
            arguments=("--quantization", "fp8_per_channel"), make=LLAMA, plain=False, fresh="tokens"
        ),
    },
    "sglang": {
        **COMMON,
        "`--enable-dp-attention`": Mode(
            tp=2,
            dp=2,
            last=1,
            arguments=("--enable-dp-attention",),
            environment={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},  # a token ends it
            fresh="bits",
        ),
        "drafts: ngram": Mode(arguments=("--speculative-algorithm", "NGRAM", *AMX)),
        "drafts: head in the chain": Mode(
            arguments=("--speculative-algorithm", "EAGLE", *EAGLE),
            make=Headed,
            act=partial(tells_draft, does="follows the chain"),
        ),
        "drafts: a model": Mode(
            arguments=("--speculative-algorithm", "STANDALONE", *DRAFT, *EAGLE),
            act=partial(tells_draft, does="keeps its weights"),
        ),
        "drafts: a model, `DELTACHAIN_DRAFT_URL`": Mode(
            arguments=("--speculative-algorithm", "STANDALONE", *DRAFT, *EAGLE),
            environment=OWN_CHAIN,
            act=drafts_as_the_model,
        ),
        "`--ep-num-redundant-experts`, `--init-expert-location`": Mode(
            make=MOE,
            arguments=("--ep-num-redundant-experts", "2", "--init-expert-location", SLOTS),
        ),
        "`--enable-eplb`, with `torch.cpu.empty_cache`": Mode(
            tp=2,
            make=MOE,
            arguments=("--ep-size", "2", "--enable-eplb", *BALANCE),
            first=OWN / "moving",
        ),
        "`in_place` caches": Mode(environment={"DELTACHAIN_PAUSE": STALE}, act=keyed),
        "`Engine` in process": Mode(program="tests.engines.sglang.in_process"),
        "LoRA": Mode(arguments=("--enable-lora", "--lora-paths", "policy=ADAPTER"), act=adapts),
        "another plugin, memory released": Mode(act=beside, first=OWN / "beside"),
        "`--enable-memory-saver`": Mode(
            arguments=("--enable-memory-saver",), act=partial(sleeps, levels="2")
        ),
        "`--quantization w8a8_int8`": Mode(
            arguments=("--quantization", "w8a8_int8"), make=LLAMA, fresh="tokens"
        ),
    },
}


class Trying:
    """A row while it is run; each method is one of its cells, and returns its text."""

    def __init__(self, mode: Mode, trainer: Any, folder: Path, versions: int) -> None:
        self.mode, self.trainer, self.folder, self.tokens = mode, trainer, folder, 0
        self.versions = versions
        self.said: dict[int, object] = {}
        self.kills = False
        if "ADAPTER" in str(mode.arguments):
            adapter(trainer.base, folder / "adapter")
        values = {"PORT": str(free_port()), "BASE": str(trainer.base), "STORE": trainer.url}
        values |= {"ADAPTER": str(folder / "adapter"), "MEETING": (folder / "meeting").as_uri()}

        def given(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        self.arguments = tuple(map(given, mode.arguments))
        self.environment = {name: given(text) for name, text in mode.environment.items()}
        self.replicas = [self._made(number, each) for number, each in enumerate(mode.each)]
        self.first, self.last = self.replicas[0], self.replicas[-1]
        self.together = "DELTACHAIN_TOGETHER" in mode.environment

    def _made(self, number: int, each: tuple[str, ...]) -> Replica:
        mode, folder = self.mode, self.folder / str(number)
        order = folder / "strike"
        options: dict[str, Any] = {
            "tp": mode.tp,
            "dp": mode.dp,
            "arguments": (*self.arguments, *each, *mode.nodes[0]),
            "environment": {"DELTACHAIN_POLL_S": "0.1", **self.environment},
            "plain": mode.plain,
            "strikes": order,
            "dev": True,
            "first": mode.first,
        }
        self.options = options
        server = start(self.trainer.base, folder, self.trainer.url, **options)
        if mode.program:
            command = server._command
            rest = command[command.index("-m") + 2 if "-m" in command else 1 :]
            server._command = [sys.executable, "-m", mode.program, *rest]
        rank = mode.tp * mode.dp - 1 if mode.last is None else mode.last
        return Replica(self.trainer, server, mode.tp, order, rank)

    @contextmanager
    def up(self, *, follow: bool) -> Iterator[None]:
        """Keep all servers up; each is started by the command and at the port as before."""
        with ExitStack() as stack:
            for more in self.mode.nodes[1:]:
                arguments, tp = (*self.arguments, *more), self.mode.tp
                node = second_node(self.trainer, self.folder / "0", arguments, tp)
                stack.enter_context(node)
            for replica in self.replicas:
                replica.server._environment["DELTACHAIN_FOLLOW"] = str(int(follow))
            with ThreadPoolExecutor() as pool:
                servers = [replica.server for replica in self.replicas]
                list(pool.map(stack.enter_context, servers))
            try:
                yield
            except (Exception, pytest.fail.Exception) as exc:
                if not self.kills and any(DEAD in one.log() for one in servers):
                    raise RuntimeError("the server ended") from exc
                raise

    def shown(self, server: Server) -> object:
        return server.checksums() if self.mode.fresh == "bits" else answers(server, 8)

    def is_at(self, version: int) -> None:
        """Assert that every server holds a version, and generates with it."""
        for replica in self.replicas:
            replica.server.wait_for(lambda status: status["version"] == version)
            if not self.mode.fresh:
                assert replica.goes_on_as(version)
                self.tokens += 8 * 24
            else:
                shown = self.shown(replica.server)
                assert self.said.setdefault(version, shown) == shown
                others = [said for other, said in self.said.items() if other != version]
                assert shown not in others, f"other versions are alike {version}"
            last = replica.server.status()["last"]
            # A scrub that found other bits on a rank would have written them anew.
            assert replica.server.post("scrub").json()["last"] == last

    def follow(self) -> str:
        if self.mode.fresh:
            for _ in range(self.versions):
                self.is_at(self.trainer.step())
            return f"{self.versions} versions"
        trial = Trial(self.trainer, self.first.server, push=False)
        finish = {"length", "abort"} if self.mode.pause == "abort" else {"length"}
        seen = checked(
            trial, self.versions, finish=finish, stale=self.mode.pause == STALE, streams=2
        )
        every = [*seen.generated, *trial.fresh]
        self.tokens += sum(len(answer.tokens) for _, answer in every)
        self.is_at(self.trainer.head)
        self.mode.act(self.first)
        return f"{self.versions} versions"

    def rollback(self) -> str:
        back = self.trainer.head - 1
        for replica in self.replicas:
            answer = replica.server.post("rollback", version=back)
            assert answer.status_code == 200, answer.text
        self.is_at(back)
        for replica in self.replicas:
            replica.server.post("release")
        self.is_at(self.trainer.head)
        return "right"

    def kill(self) -> None:
        """Kill a rank in a swap; what is still said until its server ends is of one version."""
        self.kills = True
        strikes.order(self.last.strikes, "write", rank=self.last.last, kill=True)
        self.trainer.step()
        until = time.monotonic() + 120
        while not self.last.is_struck():
            assert time.monotonic() < until, "the rank was not killed"
            time.sleep(0.01)
        within_s = SILENT_S if self.mode.nodes[1:] else STOP_S
        with ThreadPoolExecutor(1) as pool:
            ready = pool.submit(self.last.ready_for, within_s)
            words = self.last.last_words([5, 6, 7], within_s)
        log(f"not ready {ready.result():.2f} s after the kill")
        for answer in words:
            if not self.mode.fresh:
                judge = self.last.judge(int(answer.spans[0][2]))
                assert not judge.wrong(answer.prompt, answer.tokens, range(len(answer.tokens)))
        assert not self.last.server.alive or self.last.server.readiness() <= {503}
        if self.mode.joint:
            first = [
                answer for one in self.replicas for answer in one.last_words([5, 6, 7], ENDS_S)
            ]
            assert not first, "it generates without experts"
            assert not any(one.server.alive for one in self.replicas)
        elif len(self.replicas) > 1:
            head = self.trainer.step()
            most = head - 1 if self.together else head
            self.first.server.wait_for(lambda status: status["version"] == most)
            time.sleep(5)
            assert self.first.server.status()["version"] == most

    def push(self) -> str:
        new = self.trainer.step()
        for replica in self.replicas:
            replica.server.update(new)
        self.is_at(new)
        return "right"


def cells(mode: Mode, folder: Path, versions: int) -> Iterator[tuple[str, str]]:
    with mode.make(folder) as trainer:
        trying = Trying(mode, trainer, folder, versions)
        with trying.up(follow=True):
            yield "follow", trying.follow()
            yield "rollback", trying.rollback()
            trying.kill()
        with trying.up(follow=trying.together):  # one alone may not catch up
            trying.is_at(trainer.head)
            yield "kill -9, restart", "right"
            yield "push", trying.push()
        if mode.fresh:
            options = {**trying.options, "strikes": None}
            with start(trainer.pulled(trainer.head), folder / "fresh", **options) as server:
                assert trying.shown(server) == trying.said[trainer.head]
            yield "wrong tokens", f"0, as a fresh load: {mode.fresh}"
        else:
            yield "wrong tokens", f"0 of {trying.tokens:,}"


def words(folder: Path, error: BaseException) -> str:
    """What ended a row: our refusal, or the engine's last error, or what was found wrong."""
    logs = "".join(log.read_text(errors="replace") for log in sorted(folder.glob("*/log")))
    logs = re.sub(r".*( WARNING |died during initialization|Pyspy failed).*", "", logs)
    ours = re.findall(r"this server exits: (.*)", logs)
    raised = re.findall(r"\(Worker\S* .*, in (\w+)\n.* raise .*\n.*\] (\w+Error.*)", logs)
    theirs = [f"{error} in {where}" for where, error in raised[:1]] or re.findall(
        r"((?:\w+\.)*\w*(?:Error|Exception): .*|\b(?:Value )?error(?:[:,] | while )[^[\n]*"
        r"|assert .*)",
        logs,
    )
    if not (str(error).startswith("the server ended") and (ours or theirs)):
        return f"WRONG: {str(error) or repr(error)}"
    return f"refused: {ours[-1]}" if ours else f"{ENGINE}: {theirs[-1]}"


def is_wrong(row: Mapping[str, str]) -> bool:
    return row.get("said", "").startswith(("WRONG", "not run"))


def run(name: str, versions: int) -> dict[str, str]:
    folder = KEPT / re.sub(r"\W+", "-", name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row, began = {"mode": name, "engine": AT}, time.monotonic()
    try:
        for column, cell in cells(MODES[ENGINE][name], folder, versions):
            row[column] = cell
            log(f"{name}: {column}: {cell}")
    except BaseException as exc:
        if not isinstance(exc, Exception | pytest.fail.Exception):
            raise
        (folder / "trace").write_text("".join(traceback.format_exception(exc)))
        row["said"] = words(folder, exc)
        log(f"{name}: {row['said']}")
    return {**row, "seconds": f"{time.monotonic() - began:.0f}"}


def known(readme: str) -> tuple[str, dict[tuple[str, str], dict[str, str]]]:
    """Return the version of a README's table, and its rows by mode and version of the engine."""
    of, shown = TABLE.findall(readme)[0]
    found = {}
    for line in shown.splitlines()[2:]:
        named, *each = map(str.strip, line.strip("|").split("|"))
        mode, at = re.findall(r"^(.*?)(?:, (\d\S*))?$", named)[0]
        row = {"mode": mode, "engine": at or of, **dict(zip(COLUMNS, each, strict=False))}
        found[mode, at or of] = row
    return of, found


def table(rows: Iterable[Mapping[str, str]], of: str) -> str:
    lines = [f"| mode | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        found = [row.get(column, "") for column in COLUMNS]
        if "said" in row:
            found[found.index("")] = " ".join(row["said"].split()).replace("|", "/")[:LONGEST]
        shown = row["mode"] if row["engine"] == of else f"{row['mode']}, {row['engine']}"
        cells = [shown, *(cell.partition(". ")[0] for cell in found)]
        lines.append(f"| {' | '.join(cells).rstrip(' |')} |")
    return "\n".join(lines)


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), " ".join(text.split())[:2000], flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the engine needs the cores
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / "rows.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    rows = {(row["mode"], row["engine"]): row for row in done}
    left = [name for name in MODES[ENGINE] if is_wrong(rows.get((name, AT), {"said": "WRONG"}))]
    for name in left if given.rows is None else given.rows:
        rows[name, AT] = row = run(name, given.versions)
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
    text = README.read_text()
    of, found = known(text)
    every = (found | rows).values()
    made = table([row for name in MODES[ENGINE] for row in every if row["mode"] == name], of)
    print(made)  # noqa: T201
    if given.write:
        block = f"<!-- modes {of} -->\n\n{made}\n\n<!-- end -->"
        README.write_text(TABLE.sub(lambda _: block, text))


if __name__ == "__main__":
    main()
