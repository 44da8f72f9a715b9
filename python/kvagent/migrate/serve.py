"""The agent's part of a configuration: the command line of ``kvagent serve``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30
MIN_POOL, MAX_POOL = 64 << 10, 2 << 40  # bytes
MIN_DISK, MAX_DISK = 1 << 20, 64 << 40  # bytes
MAX_TIERS = 8


class Untranslatable(ValueError):
    """A setting without a counterpart. The text says why."""


@dataclass(slots=True)
class Serve:
    """The flags of the agent."""

    pool: int = 0
    """Bytes; 0 if nothing says how many."""
    tiers: list[str] = field(default_factory=list)
    """Nearest first."""
    eviction: str = ""

    def add_pool(self, size: int) -> str:
        """Add memory, and return what was added."""
        if not MIN_POOL <= self.pool + size <= MAX_POOL:
            raise Untranslatable(f"a pool has {MIN_POOL} to {MAX_POOL} bytes, not {self.pool + size}")
        self.pool += size
        return f"--pool {formatted(size)}"

    def add_tier(self, url: str) -> str:
        """Add a tier below the others, and return its flag."""
        if url not in self.tiers:
            if len(self.tiers) == MAX_TIERS:
                raise Untranslatable(f"the agent has at most {MAX_TIERS} tiers")
            self.tiers.append(url)
        return f"--tier {url}"

    def set_eviction(self, policy: object) -> str:
        """Set the eviction policy by another connector's name for it."""
        if str(policy).lower() != "lru":
            raise Untranslatable(f"there is no policy {policy!r}; the agent's own learns which blocks return")
        self.eviction = "lru"
        return "--eviction lru"

    def command(self) -> list[str]:
        """Return the command line."""
        pool = ["--pool", formatted(self.pool)] if self.pool else []
        tiers = [word for url in self.tiers for word in ("--tier", url)]
        return ["kvagent", "serve", *pool, *tiers, *(["--eviction", self.eviction] if self.eviction else [])]


def formatted(size: int) -> str:
    """Return bytes as the agent reads them."""
    for unit, bytes_of in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % bytes_of == 0:
            return f"{size // bytes_of}{unit}"
    return str(size)


def size_of(value: object, unit: int = 1) -> int:
    """Return a positive size in bytes, given in units of ``unit`` bytes or with a unit of its
    own.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?B)?\s*", str(value), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or isinstance(value, bool) or number <= 0:
        raise Untranslatable(f"{value!r} is not a positive size")
    if match[2]:
        unit = 1 << {"K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]
    return int(number * unit)


def disk_tier(path: object, size: int) -> str:
    """Return the URL of a disk tier."""
    text = str(path).removeprefix("file://")
    if not text.startswith("/"):
        raise Untranslatable(f"{text!r} is not an absolute path")
    if not MIN_DISK <= size <= MAX_DISK:
        raise Untranslatable(f"a disk tier has {MIN_DISK} to {MAX_DISK} bytes, not {size}")
    return f"disk:{quote(text.rstrip('/') or '/')}?capacity={formatted(size)}"


def remote_tier(value: object) -> tuple[str, str]:
    """Return the URL of a shared store's tier for an URL of LMCache, and what else is needed."""
    text = str(value)
    url = urlsplit(text)
    if url.scheme in ("redis", "rediss", "valkey") and url.hostname:
        user = f"{quote(url.username)}@" if url.username else ""
        scheme = "redis" if url.scheme == "valkey" else url.scheme
        tier = f"{scheme}://{user}{_host(url.hostname)}:{url.port or 6379}{url.path.rstrip('/')}"
        if url.password:
            return f"{tier}?password-env=KVAGENT_REDIS_PASSWORD", "set KVAGENT_REDIS_PASSWORD for the agent"
        return tier, ""
    if url.scheme == "mooncakestore" and url.hostname:
        return f"mooncake://{_host(url.hostname)}:{url.port or 50051}", ""
    if url.scheme == "s3" and url.netloc:
        match = re.fullmatch(r"([^.]+)\.s3[.-]([a-z0-9-]+)\.amazonaws\.com", url.netloc)
        if match:
            return f"s3://{match[1]}{url.path.rstrip('/')}?region={match[2]}", "the keys are those of the AWS variables"
        if "." not in url.netloc:
            return f"s3://{url.netloc}{url.path.rstrip('/')}", "the keys are those of the AWS variables"
    raise Untranslatable(f"there is no tier for {url.scheme or text}:// of this form (docs/TIERS.md)")


def mooncake_tier(config: Mapping[str, Any], ranks: int) -> str:
    """Return the URL of a Mooncake tier for a configuration of its client."""
    master = str(config["master_server_address"])
    protocol = str(config.get("protocol", "tcp"))
    if protocol not in ("tcp", "rdma"):
        raise Untranslatable(f"protocol {protocol!r}: the agent's tier has tcp and rdma")
    options = {"protocol": protocol}
    if protocol == "rdma" and config.get("device_name"):
        options["devices"] = str(config["device_name"])
    if (metadata := str(config.get("metadata_server") or "P2PHANDSHAKE")) != "P2PHANDSHAKE":
        options["metadata"] = metadata
    if config.get("global_segment_size"):
        options["segment"] = formatted(size_of(config["global_segment_size"]) * ranks)
    if master.startswith("etcd://"):
        options["master"] = master
        master = ""
    elif not re.fullmatch(r".+:\d+", master):
        raise Untranslatable(f"master_server_address {master!r}: the agent needs HOST:PORT or etcd://...")
    return f"mooncake://{master}?" + "&".join(f"{name}={quote(value, safe=':/,')}" for name, value in options.items())


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
