"""Benchmark of a store: throughput and latency.

On ``s3://`` the baseline is bare boto3 with the same bytes in the same round, in ranges of 16 MiB
by 8 threads into one buffer. All written objects are removed at the end, also after Ctrl-C.
"""

import io
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from deltachain.chain.chain import Chain
from deltachain.chain.plan import Plan
from deltachain.chain.upload import DENSE_SHARE, EdgeKeys, EdgeUpload
from deltachain.errors import ConfigError, StoreError
from deltachain.format.documents import Edge, Table
from deltachain.kernels import host
from deltachain.publish.wire_form import dense_change
from deltachain.publish.writer import Writer
from deltachain.store import Store, open_store
from deltachain.types import StateDigest, TensorSpec
from tests.bench import report
from tests.bench.report import Candidate, Timings, round_robin, say
from tests.support.fetch import fetch

PIECE: Final = 16 << 20
THREADS: Final = 8


class BareS3:
    """One bucket through boto3, configured by the environment."""

    def __init__(self, url: str) -> None:
        import boto3  # noqa: PLC0415 - an extra
        from boto3.s3.transfer import TransferConfig  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        plain: Any = "when_required"
        config = Config(
            max_pool_connections=2 * THREADS,
            request_checksum_calculation=plain,
            response_checksum_validation=plain,
        )
        self._client: Any = boto3.client("s3", config=config)
        self._transfer = TransferConfig(
            multipart_threshold=PIECE, multipart_chunksize=PIECE, max_concurrency=THREADS
        )

    def put(self, key: str, data: bytes) -> None:
        body = io.BytesIO(data)
        self._client.upload_fileobj(body, self._bucket, self._at(key), Config=self._transfer)

    def get(self, key: str, nbytes: int) -> bytearray:
        buffer = bytearray(nbytes)
        view = memoryview(buffer)

        def get_piece(start: int) -> None:
            stop = min(start + PIECE, nbytes)
            wanted = f"bytes={start}-{stop - 1}"
            reply = self._client.get_object(Bucket=self._bucket, Key=self._at(key), Range=wanted)
            raw = reply["Body"]._raw_stream
            while start < stop:
                count = raw.readinto(view[start:stop])
                if not count:
                    raise EOFError(f"{key}: ends at byte {start} of {stop}")
                start += count

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(get_piece, range(0, nbytes, PIECE)))
        return buffer

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


WEIGHTS: Final = 1 << 23

STD: Final = 0.02
"""Standard deviation of the weights, which determines the compression of their exponents; that of
``DENSE_SHARE``."""


@dataclass(frozen=True, slots=True)
class AnchorVersion:
    """Version 0 of a chain: an anchor of one part."""

    chain: Chain
    plan: Plan
    edge: Edge
    part: bytes
    numel: int


def make_version(store: Store, nbytes: int) -> AnchorVersion:
    count = max(1, round(nbytes / DENSE_SHARE / 2 / WEIGHTS))
    numel = min(WEIGHTS, round(nbytes / DENSE_SHARE / 2))
    specs = [TensorSpec(f"layers.{n}.weight", "BF16", (numel,)) for n in range(count)]
    rng = np.random.default_rng(0)
    table = Table(tensors=tuple((s.name, s.dtype, s.shape) for s in specs))
    chain = Chain.create(store, table, chain_id="bench", time=0.0, assets={})
    writer = Writer(chain, numel=numel * count, metadata={}, parent=None)
    keys = EdgeKeys(kind="anchor", version=0, epoch=0, commit_id="bench")
    upload, total = EdgeUpload(store, keys, raw=False, part_nbytes=1 << 40), StateDigest()
    for spec in specs:
        values = rng.standard_normal(spec.numel, dtype=np.float32)
        change = dense_change(spec, host.cast_bf16(values * np.float32(STD)))
        total += change.digest
        upload.add(change)
    edge = upload.finish()
    committed = writer.commit(edge, state=total, step=None, nnz=numel * count)
    ref = edge.parts[0]
    part = bytes(store.read(ref.key, nbytes=ref.nbytes))
    return AnchorVersion(chain, chain.plan(None, committed), edge, part, numel * count)


NBYTES: Final = 64_000_000
ROUNDS: Final = 8
LATENCIES: Final = 20
NAMES: Final = {
    "bare put": "bare boto3: multipart put",
    "put": "put",
    "bare get": "bare boto3: ranged get into one buffer",
    "get": "read",
    "version": "fetch a version: read, verify, decode",
}
CAVEAT: Final = "Medians, in turn. Shares are the median over rounds of the share in that round."


@contextmanager
def scratch(url: str) -> Iterator[Store]:
    store = open_store(f"{url.rstrip('/')}/bench-{secrets.token_hex(4)}", writer=True)
    try:
        yield store
    finally:
        with suppress(StoreError):  # must not hide an earlier error
            for info in list(store.list()):
                store.delete(info.key)
        store.close()


def measure(store: Store, version: AnchorVersion, bare: BareS3 | None, rounds: int) -> Timings:
    part = version.part
    ref = version.edge.parts[0]

    def get() -> None:
        if len(store.read(ref.key, nbytes=ref.nbytes, pin=ref.pin)) != len(part):
            raise ArithmeticError("read another size than was put")

    def follow() -> None:
        fetched = fetch(version.chain, version.plan)
        elements = sum(delta.values.size for delta in fetched.deltas())
        if elements != version.numel:
            raise ArithmeticError(f"decoded {elements} of {version.numel} elements")

    candidates = [
        Candidate("put", lambda: store.put("objects/put", part)),
        Candidate("get", get),
        Candidate("version", follow),
    ]
    if bare is not None:
        candidates = [
            Candidate("bare put", lambda: bare.put("objects/bare", part)),
            candidates[0],
            Candidate("bare get", lambda: bare.get(ref.key, len(part))),
            *candidates[1:],
        ]
    return round_robin(candidates, rounds)


def latencies(store: Store) -> dict[str, dict[str, float]]:
    calls: dict[str, Callable[[str], object]] = {
        "commit (put if absent)": lambda key: store.put_if_absent(key, b"x" * 4096),
        "look (find)": store.find,
        "get 4 KB": store.get,
        "get 1 KB range": lambda key: store.get_range(key, 1024, 1024),
    }
    found = {}
    for name, call in calls.items():
        say(name)
        seconds = []
        for number in range(LATENCIES):
            start = time.perf_counter()
            call(f"latencies/{number:03}")
            seconds.append(time.perf_counter() - start)
        tail = quantiles(seconds, n=20)[-1]
        found[name] = {"median_ms": 1e3 * median(seconds), "p95_ms": 1e3 * tail}
    return found


def run(url: str, *, nbytes: int = NBYTES, rounds: int = ROUNDS) -> Mapping[str, Any]:
    with scratch(url) as store:
        say(f"a version of {nbytes / 1e6:.0f} MB")
        version = make_version(store, nbytes)
        bare = BareS3(store.url) if store.url.startswith("s3://") else None
        timings = measure(store, version, bare, rounds)
        small = latencies(store)
    floors = {"put": "bare put", "get": "bare get", "version": "bare get"}
    rows = []
    for name in timings.seconds:
        floor = floors.get(name, "")
        share = timings.paired_ratio(name, floor) if floor in timings.seconds else None
        row = report.speeds(name, timings, len(version.part))
        mb_per_s = len(version.part) / row["median_s"] / 1e6
        rows.append(row | {"mb_per_s": mb_per_s, "of_bare": share})
    return {
        "benchmark": "store",
        "url": url,
        "nbytes": len(version.part),
        "rounds": rounds,
        "rows": rows,
        "latencies": small,
        "machine": report.machine(),
    }


def main(url: str | None, *, json_output: bool, nbytes: int = NBYTES) -> int:
    if url is None:
        hint = "python -m tests.bench store s3://bucket/prefix"
        raise ConfigError("no store given", hint=hint)
    result = run(url, nbytes=nbytes)
    title = f"{result['nbytes'] / 1e6:.0f} MB in {url}"
    speeds = report.grid(title, "", "median s", "MB/s", "of bare boto3")
    for row in result["rows"]:
        share = "" if row["of_bare"] is None else f"{row['of_bare']:.2f}"
        speeds.add_row(
            NAMES[row["name"]], f"{row['median_s']:.3f}", f"{row['mb_per_s']:.0f}", share
        )
    small = report.grid("Small requests", "", "median ms", "p95 ms")
    for name, figures in result["latencies"].items():
        small.add_row(name, f"{figures['median_ms']:.1f}", f"{figures['p95_ms']:.1f}")
    report.emit(result, [speeds, small], json_output=json_output, caveat=CAVEAT)
    return 0
