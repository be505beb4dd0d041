"""Some real holders in this process that know each other, without a controller."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from memstore.config import Config
from memstore.core.wire.orders import HostAddress, HostNews
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.scratch import scratch_store_name

ARENA_BYTES = 8 << 20


@contextlib.contextmanager
def two_holders(chunk_bytes: int, **fields: Any) -> Iterator[tuple[Holder, Holder]]:
    """Yield the holders of hosts a and b; remove everything of them afterwards."""
    with some_holders("ab", chunk_bytes, **fields) as (a, b):
        yield a, b


@contextlib.contextmanager
def some_holders(hosts: Sequence[str], chunk_bytes: int, **fields: Any) -> Iterator[list[Holder]]:
    """Yield the holders of these hosts; remove everything of them afterwards."""
    config = Config(
        store=scratch_store_name(),
        arena_bytes=ARENA_BYTES,
        chunk_bytes=chunk_bytes,
        interface="127.0.0.1",
        scrub_bytes_per_s=0,
        **fields,
    )
    secret = secrets.token_bytes(32)
    holders: list[Holder] = []
    try:
        for host in hosts:
            identity = HostIdentity(host, read_boot_id(), True, {})
            holders.append(Holder(identity, config, secret=secret, arena_limit_bytes=ARENA_BYTES))
        for holder in holders:
            rows = tuple(HostAddress(h.state.info.host_id, h.state.info.endpoints, 1) for h in holders)
            holder.set_view(HostNews(hosts=rows, gone=None, jobs=()))
        yield holders
    finally:
        for holder in holders:
            holder.close()
        shutil.rmtree(store_root(config), ignore_errors=True)
