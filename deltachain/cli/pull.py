"""``deltachain pull``: write a version to a checkpoint folder."""

from deltachain.cli import console as c
from deltachain.cli import options
from deltachain.cli.follow import receipt_row


def pull(  # noqa: PLR0913 - one argument an option
    url: options.Url,
    *,
    out: options.Out,
    version: options.AtVersion = None,
    step: options.AtStep = None,
    tag: options.TagName = "",
    at: options.At = "",
    base: options.Base = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a version of a chain to a checkpoint folder for `from_pretrained`.

    A folder of an earlier pull or follow is updated or rolled back by the cheapest plan, once the
    result is proven. Folders with other weights are refused.

    Example: `deltachain pull /mnt/policy --version 7 --out policy-7`

    Example: `deltachain pull /mnt/policy --tag eval-step-4000 --out policy-4000`
    """
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import choose
    from deltachain.cli.progress import watching
    from deltachain.store import open_store
    from deltachain.subscribe import SubscribeConfig, Subscriber
    from deltachain.subscribe.targets.folder import BUDGET, OwnFolder, write_assets

    choice = options.choice_of(version, step=step, tag=tag, at=at)
    config = SubscribeConfig(url=url, base=base, undo_applies=0, stage_budget=BUDGET)
    folder = OwnFolder(out)
    with (
        watching(open_store(url), f"pulling into {out.name}") as store,
        Subscriber(config, folder, store=store) as subscriber,
    ):
        folder.refuse_other(Chain.open(store).identity.chain)  # before its record is believed
        chain = subscriber.chain  # opening it identifies the version in the folder
        if choice.is_search:
            version = choose(chain, choice).version
        held = subscriber.version
        if version is not None and held is not None and version < held:
            subscriber.rollback(version)
            receipt = subscriber.last
        else:
            receipt = subscriber.update(version)
        written = write_assets(chain, out, trusted=trust_remote_code)
        report = {
            "url": chain.store.url,
            "out": str(out),
            "version": subscriber.version,
            "state": subscriber.held.state if subscriber.held else None,
            "applied": None if receipt is None else receipt_row(receipt),
            "files": written,
        }
    if as_json:
        c.write_json(report)
    elif receipt is None:
        c.out().print(c.clean(f"nothing to do: {out} holds version {report['version']}"))
    else:
        seconds = receipt.fetch_s + receipt.stage_s + receipt.swap_s
        fetched = f"{c.nbytes(receipt.nbytes)} fetched, {seconds:.1f} s"
        c.done(f"version {report['version']} in {out}  {fetched}", str(receipt.state))
