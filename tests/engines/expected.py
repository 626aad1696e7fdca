"""What a server should hold and say at a version, found without any of the code under test.

Weights are judged by their bits: the checkpoint is cut into the shards of each rank by hand. Tokens
are judged by transformers, in fp32 on the same bits.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NAMES: Final = ("gate", "router")
"""Last parts of the names that transformers gives them; each has a ``weight``, a row an expert."""


def routers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in NAMES and hasattr(module, "weight")
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: cast("Tensor", one.weight).detach() for name, one in routers(model).items()}


@torch.no_grad()
def inputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """What reaches each router while a model runs, ``(tokens, hidden size)`` in fp32, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        found[name] = given[0].reshape(-1, given[0].shape[-1]).float()

    with ExitStack() as hooks:
        for name, router in routers(model).items():
            hook = router.register_forward_pre_hook(partial(keep, name))
            hooks.callback(hook.remove)
        run()
    return found


@torch.no_grad()
def rounding(exact: nn.Module, rounded: nn.Module, run: Callable[[nn.Module], object]) -> float:
    """The greatest difference between the router logits of a model and of itself in bf16."""
    sides = [
        {name: linear(given, weights(model)[name].float()) for name, given in found.items()}
        for model in (exact, rounded)
        for found in (inputs(model, partial(run, model)),)
    ]
    each = [float((sides[0][name] - sides[1][name]).abs().max()) for name in sides[0]]
    return max(each, default=0.0)


def nudged(model: nn.Module, position: int, by: float, run: Callable[[], object]) -> Iterator[None]:
    """Move the logit of one expert after another at a position, up and down; yield at each."""
    for name, given in inputs(model, run).items():
        weight, at = weights(model)[name], given[position]
        for expert in range(len(weight)):
            for change in (by, -by):
                with _restored(weight):
                    weight[expert] += change * at / at.dot(at)
                    yield


@contextmanager
def _restored(weight: Tensor) -> Iterator[None]:
    kept = weight.clone()
    try:
        yield
    finally:
        weight.copy_(kept)


SCALE = "_scale"

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantised(checkpoint: Path) -> bool:
    return "quantization_config" in json.loads((checkpoint / "config.json").read_text())


def load(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose linear layers round as kernels of eight bits do.

    Weights are codes times scales. The activations of a token become codes of the same dtype, the
    largest magnitude the last one: compressed-tensors' dynamic strategy ``token``.
    """
    tensors = {n: t for f in checkpoint.glob("*.safetensors") for n, t in load_file(f).items()}
    configuration = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    del configuration.quantization_config
    made: PreTrainedModel = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    codes = {name: tensor for name, tensor in tensors.items() if tensor.dtype in LARGEST}
    floats = {name: tensor for name, tensor in tensors.items() if name not in codes}
    scales = {name: floats.pop(name + SCALE).float() for name in codes}
    weights = {name: tensor.float() * scales[name] for name, tensor in codes.items()}
    absent, unexpected = made.load_state_dict(floats | weights, strict=False)
    tied = {name for name in absent if name == "lm_head.weight"}
    assert not unexpected
    assert set(absent) <= tied
    made.tie_weights()
    for name, tensor in codes.items():
        layer = made.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_pre_hook(partial(_round_activations, tensor.dtype))
    return cast("PreTrainedModel", nn.Module.to(made, dtype).eval())


def _round_activations(
    dtype: torch.dtype, _: nn.Module, given: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    activations = cast("Tensor", given[0])
    largest = activations.float().abs().amax(-1, keepdim=True).clamp_min(1e-7)
    steps = largest / LARGEST[dtype]
    codes = activations.float() / steps
    rounded = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return ((rounded * steps).to(activations.dtype), *given[1:])


MARGIN: Final = 0.25
"""Logits below the best one at which a token is not the greedy choice: both engines round."""

ROUNDINGS: Final = 2.0
"""The same for what rounds more, latent attention for one: errors of transformers in bf16."""

CANDIDATES: Final = 5
"""Tokens of the highest logits, whose errors those are."""

NOISY: Final = 8

_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_BY_COLUMN: Final = ("o_proj", "down_proj")
_BY_ROW: Final = ("embed_tokens", "lm_head")


def sharded(checkpoint: Path, tp: int = 1) -> dict[str, Tensor]:
    """Every parameter that the engines make of a llama-like checkpoint, by rank and name."""
    tensors = {
        n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()
    }
    return {
        f"tp{rank}:{name}": shard
        for rank in range(tp)
        for name, shard in _shards(tensors, rank, tp).items()
    }


def _shards(tensors: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        *path, layer, kind = name.split(".")
        fused = next((f for f, parts in _FUSED.items() if layer in parts), "")
        if fused:
            whole = ".".join([*path, fused, kind])
            parts = [tensors[".".join([*path, part, kind])] for part in _FUSED[fused]]
            found[whole] = torch.cat([part.chunk(tp)[rank] for part in parts])
        elif layer in _BY_COLUMN:
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif layer in _BY_ROW:
            found[name] = tensor.chunk(tp)[rank]
        else:
            found[name] = tensor
    return found


def holds(server: Any, checkpoint: Path, tp: int = 1) -> bool:
    """Whether a server's parameters are those of a checkpoint, bit by bit."""
    cut = sharded(checkpoint, tp)
    return bool(server.checksums() == {name: server.digest(bits) for name, bits in cut.items()})


class Judge:
    def __init__(self, checkpoint: Path) -> None:
        self._model, self._rounding = (
            _loaded(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16)
        )

    def wrong(
        self, prompt: Sequence[int], tokens: Sequence[int], which: Iterable[int]
    ) -> list[int]:
        """Those of some positions whose token is not the greedy one after all before it.

        Where routing or attention is close to a tie, rounding decides by more than the tolerance: a
        token is right as well if it is the greedy one of weights that are noisy by a rounding, or
        of a choice of experts that a rounding of one router logit decides.
        """
        gap, margin = self.gaps(prompt, tokens)
        left = [position for position in which if gap[position] > margin]
        for model in self._noisy if left else ():
            gap = _gap(self._logits(model, prompt, tokens), tokens)
            left = [position for position in left if gap[position] > MARGIN]
        return [position for position in left if not self._tied(prompt, tokens, position)]

    def _tied(self, prompt: Sequence[int], tokens: Sequence[int], position: int) -> bool:
        """Whether a token is the greedy one once a router logit at its position is rounded."""

        def run(model: nn.Module) -> Tensor:
            return self._logits(cast("PreTrainedModel", model), prompt, tokens)

        if not routers(self._model):
            return False
        by = ROUNDINGS * rounding(self._model, self._rounding, run)
        at = len(prompt) + position - 1
        return any(
            _gap(run(self._model), tokens)[position] <= MARGIN
            for _ in nudged(self._model, at, by, lambda: run(self._model))
        )

    def gaps(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, float]:
        exact, rounded = (
            self._logits(model, prompt, tokens) for model in (self._model, self._rounding)
        )
        best = exact.topk(CANDIDATES, -1).indices
        gaps = [one.gather(-1, best[:, :1]) - one.gather(-1, best) for one in (exact, rounded)]
        margin = max(MARGIN, ROUNDINGS * float((gaps[0] - gaps[1]).abs().max()))
        return _gap(exact, tokens), margin

    @cached_property
    def _noisy(self) -> list[PreTrainedModel]:
        dice = torch.Generator().manual_seed(5)
        found = [copy.deepcopy(self._model) for _ in range(NOISY)]
        for weight in (weight for model in found for weight in model.parameters()):
            noise = torch.rand(weight.shape, generator=dice) * 2 - 1
            weight.data.mul_(1 + noise * torch.finfo(torch.bfloat16).eps / 2)
        return found

    def _logits(
        self, model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]
    ) -> Tensor:
        with torch.no_grad():
            found = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits
        return cast("Tensor", found[0, len(prompt) - 1 : -1].float())

    def next(self, tokens: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """Logits after some tokens, and keys and values; those before them may be another's."""
        with torch.no_grad():
            found = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return found.logits[0, -1], found.past_key_values


def _loaded(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    if is_quantised(checkpoint):
        return load(checkpoint, dtype)
    found = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
    return cast("PreTrainedModel", found.eval())


def _gap(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    return logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def wrong_steps(
    judge: Callable[[int], Judge],
    prompt: Sequence[int],
    tokens: Sequence[int],
    spans: Iterable[tuple[int, int, str]],
) -> list[int]:
    """Positions whose token is not the greedy one of the version that it is labelled with.

    For requests that go on after an update with the keys and values of older versions: each step
    is made anew by the version that its token is labelled with, after what the ones before it left.
    """
    found, cache = [], None
    for start, end, label in spans:
        for position in range(start, end):
            given = tokens[position - 1 : position] if position else prompt
            logits, cache = judge(int(label)).next(given, cache)
            if logits.max() - logits[tokens[position]] > MARGIN:
                found.append(position)
    return found
