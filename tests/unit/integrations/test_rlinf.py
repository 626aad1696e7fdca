"""The syncer of RLinf, with RLinf's own base class if it is installed, else with its signatures."""

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from deltachain import errors
from deltachain.kernels.protocol import same_bits
from deltachain.kernels.torch_kernels import bits_of

ROOT = Path(__file__).resolve().parents[3]
REAL = find_spec("rlinf") is not None
BF16, F32 = torch.bfloat16, torch.float32


class Base:  # of rlinf 0.3.0
    async def init_sender(self, state_dict: Any, param_names_need_sync: Any, send: Any) -> None:
        """Note that this is a sender."""

    async def init_receiver(self, state_dict: Any, recv: Any) -> None:
        """Note that this is a receiver."""

    @classmethod
    def create(cls, config: Any) -> Any:
        raise ValueError(f"Unsupported weight syncer type: {config['type']}")


@pytest.fixture
def syncer_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if not REAL:
        for name in ("rlinf", "rlinf.hybrid_engines", "rlinf.hybrid_engines.weight_syncer"):
            module = ModuleType(name)
            vars(module)["WeightSyncer"] = Base
            monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("deltachain.integrations.rlinf").DeltaChainWeightSyncer
    monkeypatch.delitem(sys.modules, "deltachain.integrations.rlinf")


class Policy(nn.Module):
    """A tied head, a frozen layer, a value head in fp32 and a persistent buffer."""

    def __init__(self, seed: int, dtype: torch.dtype = BF16, value: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.frozen = nn.Embedding(30, 8), nn.Linear(8, 8)
        self.head, self.value_head = nn.Linear(8, 30, bias=False), nn.Linear(8, 1)
        self.to(dtype)
        self.value_head.to(value)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def train_step(self, number: int) -> None:
        torch.manual_seed(number)
        with torch.no_grad():
            for weight in (self.embed.weight, self.value_head.weight):
                weight.add_(torch.randn_like(weight))
            self.embed.weight[0, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
            self.get_buffer("seen").add_(number)

    def names(self) -> list[str]:
        trained = [name for name, one in self.named_parameters() if one.requires_grad]
        return [*trained, *(name for name, _ in self.named_buffers())]


class Channel:
    """RLinf's broadcast: every receiver gets the message; nobody answers."""

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[Any]] = []

    async def send(self, message: Any) -> None:
        for queue in self.queues:
            queue.put_nowait(message)


class Receiver:
    def __init__(self, syncer: Any, channel: Channel, policy: Policy) -> None:
        self.syncer, self.policy = syncer, policy
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        channel.queues.append(self.queue)

    async def start(self) -> "Receiver":
        await self.syncer.init_receiver(self.policy.state_dict(), recv=self.queue.get, send=None)
        return self

    async def apply(self) -> int:
        found = await asyncio.wait_for(self.syncer.apply(self.policy, self.queue.get), 60)
        assert isinstance(found, int)
        return found


def moves(policy: Policy) -> None:
    """Put the weights elsewhere, as a worker of RLinf does that offloads them and loads them."""
    moved: dict[Tensor, Tensor] = {}
    for holder in policy.modules():
        for held in (holder._parameters, holder._buffers):
            for one in held.values():
                if one is not None and one not in moved:
                    moved[one] = one.data = one.data.clone()


def same(sender: Policy, receiver: Policy) -> None:
    expected: dict[str, Tensor] = sender.state_dict()
    for name, one in receiver.state_dict().items():
        cast = expected[name].to(one.dtype)
        assert same_bits(bits_of(one).reshape(-1), bits_of(cast).reshape(-1)), name


@pytest.mark.parametrize(
    ("sender", "receivers"),
    [
        ((BF16, F32), [(BF16, F32)] * 8),
        ((BF16, F32), [(BF16, F32), (F32, F32), (BF16, BF16), (torch.float16, F32)]),
        ((F32, F32), [(BF16, BF16), (F32, F32)]),
    ],
    ids=["8 receivers", "mixed receivers", "fp32 sender"],
)
def test_receivers_of_any_dtype_follow_join_late_and_outlive_the_sender(
    syncer_class: Any,
    tmp_path: Path,
    sender: tuple[torch.dtype, torch.dtype],
    receivers: list[tuple[torch.dtype, torch.dtype]],
) -> None:
    url = str(tmp_path / "chain")

    async def run() -> None:
        channel, policy, syncer = Channel(), Policy(0, *sender), syncer_class(url)
        fleet = [
            await Receiver(syncer_class(url), channel, Policy(9 + n, *dtypes)).start()
            for n, dtypes in enumerate(receivers)
        ]
        await syncer.init_sender(
            state_dict=policy.state_dict(), send=channel.send, param_names_need_sync=policy.names()
        )
        for number in (1, 2):
            for one in fleet:
                moves(one.policy)
            policy.train_step(number)
            await syncer.sync(policy.state_dict(), channel.send, torch.tensor(number))
            assert [await one.apply() for one in fleet] == [number] * len(fleet)
            for one in fleet:
                same(policy, one.policy)
        late = await Receiver(syncer_class(url), channel, Policy(99, *receivers[0])).start()
        same(policy, late.policy)  # before any message
        syncer._publisher.close()
        again, restarted = Policy(0, *sender), syncer_class(url)
        again.train_step(1)  # an earlier checkpoint
        await restarted.init_sender(again.state_dict(), again.names(), channel.send)
        again.train_step(7)
        await restarted.sync(again.state_dict(), channel.send, 7)
        assert [await one.apply() for one in (*fleet, late)] == [7] * (len(fleet) + 1)
        for one in (*fleet, late):
            same(again, one.policy)
        restarted._publisher.close()

    asyncio.run(run())


def test_a_configuration_makes_it_once_it_is_registered(
    syncer_class: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (base,) = syncer_class.__bases__
    monkeypatch.setattr(base, "create", base.create)
    kept: Any = importlib.import_module("omegaconf").OmegaConf.create if REAL else dict
    given = kept({"type": "deltachain", "deltachain": {"url": str(tmp_path), "prefixes": ["head"]}})
    with pytest.raises(ValueError, match="Unsupported weight syncer type: deltachain"):
        base.create(given)
    sys.modules[syncer_class.__module__].register()
    made = base.create(given)
    assert type(made) is syncer_class
    assert (made.config.url, made.prefixes) == (str(tmp_path), ["head"])
    with pytest.raises(ValueError, match="Unsupported weight syncer type: other"):
        base.create(kept({"type": "other"}))


@pytest.mark.slow
@pytest.mark.venv("verl")
def test_rlinf_itself_does_the_same() -> None:
    code = "import pytest, rlinf, sys; sys.exit(pytest.main(sys.argv[1:]))"
    asked = ("-p", "no:asyncio", "-p", "no:cacheprovider", "-m", "not slow", __file__)
    command = [str(ROOT / ".venv-verl" / "bin" / "python"), "-c", code, *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_receiver_that_holds_the_head_takes_no_older_version(
    syncer_class: Any, tmp_path: Path
) -> None:
    async def run() -> None:
        syncer, policy, copied = syncer_class(str(tmp_path)), Policy(0), Policy(0)
        for one in (policy, copied):  # a copy of a tied tensor is never the head's
            one.head.weight = nn.Parameter(one.embed.weight.detach().clone())
        await syncer.init_sender(policy.state_dict(), policy.names())
        older = asyncio.Queue[Any]()
        for number in (1, 2):
            policy.train_step(number)
            await syncer.sync(policy.state_dict(), older.put, number)
        receiver = Receiver(syncer_class(str(tmp_path)), Channel(), copied)
        receiver.policy.load_state_dict(policy.state_dict())
        receiver.queue = older
        await receiver.start()
        await receiver.apply()
        same(policy, receiver.policy)
        syncer._publisher.close()

    asyncio.run(run())


def test_tensors_that_a_receiver_alone_ties_are_refused(syncer_class: Any, tmp_path: Path) -> None:
    async def run() -> None:
        syncer, policy = syncer_class(str(tmp_path)), Policy(0)
        policy.head.weight = nn.Parameter(policy.embed.weight.detach().clone())
        await syncer.init_sender(policy.state_dict(), policy.names())
        receiver = Receiver(syncer_class(str(tmp_path)), Channel(), Policy(1))
        await receiver.start()
        policy.train_step(1)
        await syncer.sync(policy.state_dict(), receiver.queue.put, 1)
        with pytest.raises(errors.TensorMismatchError, match=r"'head\.weight' shares memory"):
            await receiver.apply()
        syncer._publisher.close()

    asyncio.run(run())


def test_weights_of_a_device_are_not_kept_there(
    syncer_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[syncer_class.__module__], "on_host", lambda _: False)

    async def run() -> None:
        channel, policy, syncer = Channel(), Policy(0), syncer_class(str(tmp_path))
        receiver = Receiver(syncer_class(str(tmp_path)), channel, Policy(1))
        await syncer.init_sender(policy.state_dict(), policy.names(), channel.send)
        for number in (1, 2, 3):
            policy.train_step(number)
            await syncer.sync(policy.state_dict(), channel.send, number)
            assert await receiver.apply() == number
            same(policy, receiver.policy)
            weight = StorageWeakRef(receiver.policy.embed.weight.untyped_storage())
            moves(receiver.policy)

            assert weight.expired()
        syncer._publisher.close()

    asyncio.run(run())


def test_what_is_published_and_where_it_fits_are_checked_by_name(
    syncer_class: Any, tmp_path: Path
) -> None:
    url = str(tmp_path / "chain")

    async def run() -> None:
        channel, policy = Channel(), Policy(0)
        with pytest.raises(errors.ConfigError, match="no 'emb'"):
            await syncer_class(url, prefixes=["emb"]).init_sender(policy.state_dict(), [])
        with pytest.raises(errors.ConfigError, match="no sender yet"):
            await syncer_class(url).sync(policy.state_dict(), channel.send, 1)
        syncer = syncer_class(url, prefixes=["value_head"])
        await syncer.init_sender(policy.state_dict(), ["embed.weight", "seen"])
        with pytest.raises(errors.TensorMismatchError, match=r"embed.weight"):
            await Receiver(syncer_class(url), channel, nn.Linear(2, 2)).start()  # type: ignore[arg-type]
        receiver = await Receiver(syncer_class(url), channel, Policy(5)).start()
        own = Policy(5).frozen.weight
        assert torch.equal(receiver.policy.frozen.weight, own)  # neither trained nor chosen
        assert torch.equal(receiver.policy.value_head.weight, policy.value_head.weight)
        assert torch.equal(receiver.policy.embed.weight, policy.embed.weight)
        syncer._publisher.close()

    asyncio.run(run())
