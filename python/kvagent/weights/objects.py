"""Weights in an object store: a digest of the store's metadata of each object, if its client can be
imported.

An ETag or a generation belongs to one content of one object, so the digest survives restarts and is
equal on all nodes. S3's ETag is the MD5 of the content, of its parts' MD5s, or of the encrypted
content.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from kvagent.weights.samples import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_OBJECTS = 16384  # of one model
TIMEOUT_S = 5.0  # timeout of each answer of the store
TRIES = 2
SKEW_S = 60.0  # how much the store's clock may lag this machine's


def digest(url: str, since_ns: int | None) -> str:
    """Return the digest of all objects under a URL like s3://bucket/model.

    Unreadable: the text says why.

    That includes an object changed since ``since_ns``: an older one may have been loaded.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
    listed = {"s3": _s3, "gs": _gs}.get(scheme.lower())
    if listed is None:
        raise Unreadable(f"{url}: weights in such a store have no known identity; supported are s3:// and gs://")
    whole, count = hashlib.sha256(b"objects 1"), 0
    try:
        for name, size, tag, modified_s in sorted(listed(bucket, prefix)):
            if since_ns is not None and (modified_s + SKEW_S) * 1e9 >= since_ns:
                raise Unreadable(f"{url}: {name} was changed since this process started, perhaps after it was loaded")
            if not tag:
                raise Unreadable(f"{url}: the store has no ETag of {name}")
            whole.update(f"{len(name)} {name} {size} {tag}\n".encode(errors="surrogatepass"))
            count += 1
    except Unreadable:
        raise
    except Exception as error:  # the store's client may raise anything
        raise Unreadable(f"{url}: {type(error).__name__}: {error}") from error
    if not count:
        raise Unreadable(f"{url}: no objects found")
    return whole.hexdigest()[:32]


def _s3(bucket: str, prefix: str) -> Iterable[tuple[str, int, str, float]]:
    import boto3
    from botocore.config import Config

    endpoint = os.environ.get("RUNAI_STREAMER_S3_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": TRIES})
    client: Any = boto3.client("s3", endpoint_url=endpoint, config=config)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return _bounded(
        (one["Key"][len(prefix) :], one["Size"], one["ETag"], one["LastModified"].timestamp())
        for page in pages
        for one in page.get("Contents", ())
    )


def _gs(bucket: str, prefix: str) -> Iterable[tuple[str, int, str, float]]:
    from google.cloud import storage

    blobs = storage.Client().list_blobs(bucket, prefix=prefix, timeout=TIMEOUT_S)
    # CRC32C depends on the content alone; the generation belongs to this object only.
    return _bounded(
        (one.name[len(prefix) :], one.size, f"{one.md5_hash or one.generation} {one.crc32c}", one.updated.timestamp())
        for one in blobs
    )


def _bounded(objects: Iterable[tuple[str, int, str, float]]) -> list[tuple[str, int, str, float]]:
    found = []
    for one in objects:
        found.append(one)
        if len(found) > MAX_OBJECTS:
            raise Unreadable(f"more than {MAX_OBJECTS} objects")
    return found
