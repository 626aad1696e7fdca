"""Create the buckets named in the arguments at AWS_ENDPOINT_URL, unless they exist."""

import sys
from typing import Any

import boto3
from botocore.config import Config


def main(names: list[str]) -> None:
    patient = Config(retries={"total_max_attempts": 10, "mode": "standard"})
    client: Any = boto3.client("s3", config=patient)
    there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for name in names:
        if name not in there:
            client.create_bucket(Bucket=name)


if __name__ == "__main__":
    main(sys.argv[1:])
