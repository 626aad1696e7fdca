"""``deltachain estimate``: what a chain of a model will cost."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Encode
from deltachain.cli.prune import seconds
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.types import TensorSpec


def estimate(  # noqa: PLR0913 - one argument an option
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint, a config.json, or a name on the Hub."),
    ],
    *,
    density: Annotated[str, typer.Option(metavar="P", help="Share of changed elements.")] = "1%",
    encoding: Encode = "step",
    replicas: Annotated[int, typer.Option(min=1, metavar="N", help="Replicas.")] = 8,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of the trainer.")] = 1,
    engine_ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks a replica.")] = 8,
    link: Annotated[str, typer.Option(metavar="RATE", help="Link of each machine.")] = "1Gbit/s",
    every: Annotated[str, typer.Option(metavar="SPAN", help="Time between steps.")] = "30s",
    egress: Annotated[float, typer.Option(metavar="X", help="Dollars a GB read.")] = 0.09,
    as_json: AsJson = False,
) -> None:
    """Estimate bytes, seconds, memory, disk and dollars of a model's chain before a run.

    Speeds come from BENCHMARKS.md, with one core for each rank.

    Example: `deltachain estimate Qwen3-32B --ranks 64 --replicas 16 --link 10Gbit/s --every 2m`
    """
    from deltachain import estimate as to

    share = _number(density, {"%": 0.01, "": 1}, "1% or 0.01")
    rate = _number(link, _RATES, "100Mbit/s, 1Gbit/s or 2GB/s")
    run = to.CostSettings(
        share, encoding, replicas, ranks, engine_ranks, rate, seconds(every), egress
    )
    found = asdict(to.estimate(_shapes(model), run))
    c.show({"model": model, "settings": asdict(run), **found}, _show, as_json=as_json)


_RATES = {"Mbit/s": 125e3, "Gbit/s": 125e6, "MB/s": 1e6, "GB/s": 1e9}


def _number(text: str, units: dict[str, float], such_as: str) -> float:
    given = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(\D*)", text.strip())
    if given is None or given[2] not in units:
        raise ConfigError(f"{text!r} is not understood", hint=f"write {such_as}")
    return float(given[1]) * units[given[2]]


def _shapes(model: str) -> "list[TensorSpec]":
    """Return the tensors of a checkpoint, or of a configuration without weights."""
    from deltachain.checkpoint import Checkpoint, named_folder

    path = Path(model).expanduser()
    path = path if path.exists() else named_folder(model)
    config = path if path.suffix == ".json" else path / "config.json"
    if config == path or (path.is_dir() and not any(path.glob("*.safetensors"))):
        return _configured(config)
    return list(Checkpoint(path).specs.values())


def _configured(config: Path) -> "list[TensorSpec]":
    """Return the tensors of a configuration, as transformers builds it without memory."""
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    from deltachain.publish.model.conversion import SaveConversion
    from deltachain.torch_names import WIRE_NAMES
    from deltachain.types import TensorSpec

    try:
        given = AutoConfig.from_pretrained(str(config))
        is_of_text = type(given) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind: Any = AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText
        with torch.device("meta"):
            model = kind.from_config(given)
    except (ValueError, KeyError, OSError, AttributeError, TypeError, ImportError) as exc:
        raise ConfigError(
            f"{config}: transformers makes no model of it: {exc}",
            hint="give a folder with safetensors: their headers are enough",
        ) from exc
    kept = model.state_dict(keep_vars=True).items()
    live = dict({id(one): (name, one.detach()) for name, one in kept}.values())
    saving = SaveConversion(model, {name: tuple(one.shape) for name, one in live.items()})
    made = saving.convert(live)
    return [TensorSpec(n, WIRE_NAMES[one.dtype], tuple(one.shape)) for n, one in made.items()]


def _show(report: dict[str, Any]) -> None:
    run, out = report["settings"], c.out()
    seen = f"{c.count(report['numel'])} parameters, {c.nbytes(report['nbytes'])}, "
    seen += c.plural(report["tensors"], "tensor")
    said = f"{c.percent(run['density'])} changed every {run['every_s']:g} s, "
    said += f"{c.plural(run['ranks'], 'rank')}, {c.plural(run['replicas'], 'replica')}, "
    said += f"{c.nbytes(round(run['link']))}/s"
    out.print(c.facts(model=report["model"], shapes=seen, run=said))
    every = f"an anchor, one in {report['anchor_every']:,} versions"
    names = {"step": "a step", "anchor": every, "newcomer": "a newcomer, at most"}
    costs, rooms = [], []
    for name, cost in report["costs"].items():
        said, size = names.get(name, "full copies in bf16"), c.nbytes(cost["nbytes"])
        costs.append((said, size, _seconds(cost["seconds"]), f"${cost['dollars']:,.2f}"))
    for name, room in report["rooms"].items():
        rooms.append((name, *(c.nbytes(size) if size else "-" for size in room.values())))
    out.print("", c.table(("cost", ">bytes", ">seconds", ">egress"), costs), sep="\n")
    out.print("", c.table(("room", ">memory in a step", ">at most", ">disk"), rooms), sep="\n")
    phases = report["costs"]["step"]["phases"].items()
    out.print("\na step: " + ", ".join(f"{name} {_seconds(took)}" for name, took in phases))
    dear = f"${report['day']:,.0f} a day, of full copies ${report['full_day']:,.0f}"
    out.print(f"egress at ${run['egress']:g} a GB: {dear}")
    if report["period_s"] > run["every_s"]:
        took = _seconds(report["period_s"])
        out.print(f"a version takes {took}, and covers several steps", style="yellow")


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"
