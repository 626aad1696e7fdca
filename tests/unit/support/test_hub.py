import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.exceptions import ClientError
from huggingface_hub import BucketFile, BucketFolder, HfApi
from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    EntryNotFoundError,
    HfHubHTTPError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from tests.support.hub.faults import RequestFault
from tests.support.hub.server import HubServer

pytestmark = pytest.mark.full

Read = Callable[[str], bytes]

NOISE = random.Random(7).randbytes(3_000_000)


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


@pytest.fixture
def read(api: HfApi, bucket: str, tmp_path: Path) -> Read:
    def reading(path: str) -> bytes:
        target = tmp_path / "downloaded"
        api.download_bucket_files(bucket, [(path, target)], raise_on_missing_files=True)
        return target.read_bytes()

    return reading


def auth(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_stock_client_creates_lists_and_deletes_buckets(api: HfApi) -> None:
    made = api.create_bucket("me/stock")
    assert made.bucket_id == "me/stock"
    api.create_bucket("me/stock", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_bucket("me/stock")
    api.batch_bucket_files("me/stock", add=[(b"data", "a")])
    info: Any = api.bucket_info("me/stock")
    assert (info.id, info.size, info.total_files) == ("me/stock", 4, 1)
    api.delete_bucket("me/stock")
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("me/stock")
    with pytest.raises(BucketNotFoundError):
        list(api.list_bucket_tree("me/stock"))


def test_stock_client_reads_what_it_wrote_and_after_a_restart_too(
    hub: HubServer, api: HfApi, bucket: str, tmp_path: Path, read: Read
) -> None:
    (tmp_path / "file").write_bytes(NOISE)
    api.batch_bucket_files(
        bucket, add=[(tmp_path / "file", "x/large"), (b"", "x/empty"), (b"1", "s")]
    )
    assert (read("x/large"), read("x/empty"), read("s")) == (NOISE, b"", b"1")
    found = {info.path: info.size for info in api.get_bucket_paths_info(bucket, ["s", "none"])}
    assert found == {"s": 1}
    with pytest.raises(EntryNotFoundError):
        read("none")
    url = hub.url
    hub.restart()
    assert (hub.url, read("x/large")) == (url, NOISE)


def test_stock_client_lists_folders_and_pages(hub: HubServer, api: HfApi, bucket: str) -> None:
    paths = [f"d/{number}" for number in range(7)] + ["top"]
    api.batch_bucket_files(bucket, add=[(b"data", path) for path in paths])
    hub.configure(page=3)
    assert [entry.path for entry in api.list_bucket_tree(bucket, recursive=True)] == paths
    shallow = {type(entry): entry.path for entry in api.list_bucket_tree(bucket)}
    assert shallow == {BucketFolder: "d", BucketFile: "top"}
    assert [entry.path for entry in api.list_bucket_tree(bucket, "d")] == paths[:-1]


def test_stock_client_copies_deletes_and_overwrites(api: HfApi, bucket: str, read: Read) -> None:
    api.batch_bucket_files(bucket, add=[(b"old", "a")])
    (info,) = api.get_bucket_paths_info(bucket, ["a"])
    api.batch_bucket_files(bucket, copy=[("bucket", bucket, info.xet_hash, "b")])
    api.batch_bucket_files(bucket, add=[(b"newer", "a")])
    assert (read("a"), read("b")) == (b"newer", b"old")
    api.batch_bucket_files(bucket, delete=["b"])
    with pytest.raises(BucketBatchError):
        api.batch_bucket_files(bucket, delete=["b"])


def test_content_that_the_storage_lacks_is_not_registered(hub: HubServer, bucket: str) -> None:
    line = b'{"type":"addFile","path":"a","xetHash":"%s","mtime":0}\n' % (b"ab" * 32)
    url = f"{hub.url}/api/buckets/{bucket}/batch"
    reply = httpx.post(url, content=line, headers=auth(hub.token))
    assert reply.status_code == 422
    assert [failed["path"] for failed in reply.json()["failed"]] == ["a"]


def test_tokens_are_checked_and_those_of_the_storage_expire(hub: HubServer, bucket: str) -> None:
    root = f"{hub.url}/api/buckets/{bucket}"
    for token, status in (("hf_nobody", 401), (hub.read_token, 403), (hub.token, 200)):
        assert httpx.get(f"{root}/xet-write-token", headers=auth(token)).status_code == status
    assert httpx.get(f"{root}/xet-read-token").status_code == 401
    access = httpx.get(f"{root}/xet-read-token", headers=auth(hub.read_token)).json()
    absent = f"{access['casUrl']}/v1/reconstructions/{'ab' * 32}"
    for token, status in (("x", 401), (hub.token, 401), (access["accessToken"], 404)):
        assert httpx.get(absent, headers=auth(token)).status_code == status
    xorb = f"{access['casUrl']}/v1/xorbs/default/{'ab' * 32}"
    reply = httpx.post(xorb, content=b"", headers=auth(access["accessToken"]))
    assert reply.status_code == 403
    hub.configure(xet_token_s=1)
    access = httpx.get(f"{root}/xet-read-token", headers=auth(hub.token)).json()
    time.sleep(1.1)
    assert httpx.get(absent, headers=auth(access["accessToken"])).status_code == 401


def test_limit_is_told_as_the_stock_client_reads_it(hub: HubServer, bucket: str) -> None:
    hub.configure(calls=2, window_s=1.0)
    url, headers = f"{hub.url}/api/buckets/{bucket}", auth(hub.read_token)
    replies = [httpx.get(url, headers=headers) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    limits = [parse_ratelimit_headers(reply.headers) for reply in replies]
    assert [limit.remaining for limit in limits if limit] == [1, 0, 0]
    assert {(limit.limit, limit.window_seconds) for limit in limits if limit} == {(2, 1)}
    assert replies[-1].headers["Retry-After"] == "1"
    assert httpx.get(url, headers=auth(hub.token)).status_code == 200  # by token
    time.sleep(1.05)
    assert httpx.get(url, headers=headers).status_code == 200


def test_faults_strike_as_often_as_told(hub: HubServer, bucket: str) -> None:
    hub.inject(
        RequestFault(do="status", path="/api/buckets/", method="GET", status=500, skip=1, times=2)
    )
    url, headers = f"{hub.url}/api/buckets/{bucket}", auth(hub.token)
    statuses = [httpx.get(url, headers=headers).status_code for _ in range(4)]
    assert statuses == [200, 500, 500, 200]
    hub.inject(RequestFault(do="lose-reply", path=f"/api/buckets/{bucket}$", method="DELETE"))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.delete(url, headers=headers)
    assert httpx.get(url, headers=headers).status_code == 404
    assert hub.faults_left() == 0


def test_gateway_is_conditional(hub: HubServer, bucket: str, read: Read) -> None:
    namespace, _, name = bucket.partition("/")
    session = boto3.session.Session(hub.s3_key, hub.s3_secret, region_name="us-east-1")
    client = session.client("s3", endpoint_url=f"{hub.url}/s3/{namespace}")
    client.put_object(Bucket=name, Key="x/a", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=name, Key="x/a", Body=b"second", IfNoneMatch="*")
    assert read("x/a") == b"first"
    client.put_object(Bucket=name, Key="x/a", Body=b"third")
    assert client.get_object(Bucket=name, Key="x/a")["Body"].read() == b"third"
    assert client.head_object(Bucket=name, Key="x/a")["ContentLength"] == 5
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(Bucket=name, Key="absent")
