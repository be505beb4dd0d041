"""A process that connects to a job again, as a notebook's cell that is run twice does (R20, D133)."""

from __future__ import annotations

from pathlib import Path

import pytest
from link_site import WAIT_S, Site, state, together

import memstore.client.connect
from memstore.client.store import Store
from memstore.errors import CommitError, FencedError


def test_the_store_of_before_says_so_and_the_new_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the same launch key it is the same attempt; holders speak to the newer link alone."""
    site = Site(tmp_path, ["a", "b"], monkeypatch)
    try:
        former, beside = site.connect("launch")
        together(*[lambda each=each: each.put(1, state(1)).wait("committed", WAIT_S) for each in (former, beside)])
        under_way = former.put(2, state(2))  # the other rank does not put it, so it is never committed
        store, second = site.connect("launch")
        assert store.attempt == former.attempt
        with pytest.raises(CommitError, match="connected to the job again"):
            under_way.wait("durable")
        for call in (lambda: former.put(3, state(3)), former.get):
            with pytest.raises(FencedError, match="this process has connected to the job again"):
                call()
        former.close()
        together(*[lambda each=each: each.put(3, state(3)).wait("committed", WAIT_S) for each in (store, second)])
        got = store.get(rank=0)
        assert got is not None
        assert got.step == 3
    finally:
        site.close()


def test_a_single_rank_goes_on_from_the_newest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connect() of it is a launch of its own, so that get() is asked before the first put."""
    site = Site(tmp_path, ["a"], monkeypatch)
    site.place.host = "a"

    def connect() -> Store:
        site.stores.append(memstore.client.connect.connect("job", rank=0, world_size=1, config=site.config))
        return site.stores[-1]

    try:
        former = connect()
        former.put(1, state(1)).wait("committed", WAIT_S)
        store = connect()
        assert store.attempt == former.attempt + 1
        got = store.get()
        assert got is not None
        assert got.step == 1
        with pytest.raises(FencedError, match="attempt 2 was opened"):
            former.put(2, state(2))
    finally:
        site.close()
