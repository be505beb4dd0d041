"""What a reader hears of its chunks: the manifest first, then each chunk once (R27)."""

from __future__ import annotations

from typing import Any

from memstore.core.shelf import Draft
from memstore.shell.herald import Herald
from recovery.inventory import ShardId


def test_a_herald_tells_each_chunk_once() -> None:
    """The manifest goes out at once, even alone; a chunk is named when it has come, and never again."""
    said: list[dict[str, Any]] = []
    draft = Draft(ShardId("job", 1, 2, 0), [b"d"] * 4, [None] * 4, 1)
    herald = Herald(said.append, 7, b"manifest", draft)
    herald.tell()
    herald.tell()
    assert said == [{"k": "came", "read": 7, "manifest": b"manifest", "chunks": []}]
    draft.slots[3], draft.slots[1] = 30, 10
    herald.tell()
    herald.tell()
    draft.slots[0] = draft.slots[2] = 5  # two chunks of one content
    herald.tell()
    herald.tell()
    assert said[1:] == [
        {"k": "came", "read": 7, "chunks": [[1, 10], [3, 30]]},
        {"k": "came", "read": 7, "chunks": [[0, 5], [2, 5]]},
    ]
