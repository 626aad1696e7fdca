"""``deltachain push``: publish a checkpoint as the newest version of a chain."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, Encode, TakeOver, TrustRemoteCode, Url
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.publish.push import Pushed
    from deltachain.publish.quantise.settings import Quantization


def push(  # noqa: PLR0913 - one argument an option
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint folder, or one safetensors file."),
    ],
    url: Url,
    *,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Trainer step for the manifest.")
    ] = None,
    encoding: Encode = "step",
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE|FOLDER",
            help="Quantise linear layers and experts: `fp8-block`, `fp8-block-ue8m0`, "
            "`fp8-row`, `fp8-tensor`, `int8-row`, `mxfp8`, `mxfp4`, `nvfp4a16`, or "
            "one of a package; or the folder of a quantised checkpoint, for its recipe and "
            "ignored layers. Give it at every push.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYER",
            help="Layer not to quantise instead of `lm_head`: its name's end, or `re:` and a "
            "regular expression; repeatable.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a base checkpoint that all followers have, referred to instead of "
            "uploaded. Give it at every push.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    continue_reverted: Annotated[
        bool,
        typer.Option(
            "--continue-reverted",
            help="Publish other weights on top of a reverted head.",
        ),
    ] = False,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint as the newest version of a chain.

    The first push creates the chain, with configuration and tokenizer files. Each later one
    rebuilds the head and publishes the difference.

    Example: `deltachain push out/checkpoint-40 /mnt/policy --step 40`

    Example: `deltachain push out/checkpoint-40 /mnt/policy-fp8 --quantization fp8-block
    --ignore lm_head --ignore re:model.visual`
    """
    from deltachain.chain.upload import SMALL_PART_NBYTES
    from deltachain.cli.progress import watching
    from deltachain.publish.config import PublishConfig
    from deltachain.publish.push import push as publish
    from deltachain.store import open_store

    start = time.perf_counter()
    config = PublishConfig(
        url=url,
        encoding=encoding,
        quantization=_quantization(quantization, ignore),
        base=base,
        trust_remote_code=trust_remote_code,
        continue_reverted=continue_reverted,
        take_over=take_over,
        part_nbytes=SMALL_PART_NBYTES,
    )
    with watching(open_store(url), f"pushing {checkpoint.name}") as store:
        pushed = publish(store, checkpoint, config, step=step)
    report = _report(pushed, time.perf_counter() - start)
    c.show(report, _show, as_json=as_json)


def _quantization(recipe: str | None, ignore: list[str] | None) -> "Quantization | None":
    from deltachain.publish.quantise.settings import Quantization

    if recipe is None:
        if ignore:
            raise ConfigError("--ignore needs --quantization", hint="name a recipe as well")
        return None
    if not Path(recipe).exists():
        return Quantization(recipe, ignore=tuple(ignore)) if ignore else Quantization(recipe)
    if ignore:
        raise ConfigError(
            "--ignore and the layers that a checkpoint leaves exclude each other",
            hint="name a recipe with --ignore, or give the folder alone",
        )
    return Quantization.of(recipe)


def _report(pushed: "Pushed", seconds: float) -> dict[str, Any]:
    anchor, head = pushed.anchor, pushed.head.manifest
    return {
        "url": pushed.chain.store.url,
        "chain": pushed.chain.identity.chain,
        **c.fields(head, "version", "epoch", "state"),
        "committed": [
            {
                **c.fields(manifest, "version", "step", "nnz", "density", "state"),
                **c.fields(manifest.edge, "kind", "nbytes"),
                "bits_per_change": c.bits_per_change(manifest.edge.nbytes, manifest.nnz),
            }
            for manifest in (committed.manifest for committed in pushed.committed)
        ],
        "anchor": None if anchor is None else c.fields(anchor, "version", "nbytes"),
        "seconds": round(seconds, 3),
    }


def _show(report: dict[str, Any]) -> None:
    out = c.out()
    if not report["committed"]:
        out.print(f"nothing to do: version {report['version']} holds this checkpoint already")
    for version in report["committed"]:
        size = f"version {version['version']}  {version['kind']}  {c.nbytes(version['nbytes'])}"
        if version["kind"] != "delta":
            c.done(size, version["state"])
            continue
        c.done(
            f"{size}  {c.count(version['nnz'])} changed, {c.percent(version['density'])}, "
            f"{version['bits_per_change']:.2f} bits each",
            version["state"],
        )
    if report["anchor"]:
        out.print(f"   and an anchor for newcomers, {c.nbytes(report['anchor']['nbytes'])}")
