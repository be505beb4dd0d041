"""Requests by their tags, with values for what a test does not care about, and replies; each has travelled once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from msgpack import unpackb
from msgspec.structs import fields

from memstore.core.report.event_kinds import event_fields
from memstore.core.wire.calls import RankCall, decode_call
from memstore.core.wire.codec import Message, encode, tag_of
from memstore.core.wire.replies import Events, NothingStored, Status, status_fields

KINDS: Mapping[str, Any] = {tag_of(kind): kind for kind in get_args(RankCall)}
UNSAID: Mapping[str, Any] = {
    "limit_s": 20.0,
    "timeout_s": 600.0,
    "within_s": 60.0,
    "shard": None,
    "shards": None,
    "fresh": False,
    "takeover": False,
    "is_failed": False,
    "why": "no room",
    "job": None,
}


def request_of(tag: str, who: Mapping[str, Any], **said: Any) -> RankCall:
    """Return a request as the controller gets it.

    Args:
        tag: Of its type.
        who: The fields that say which rank asks, as far as the request has them.
        said: All other fields.
    """
    kind = KINDS[tag]
    known = {field.name: field.required for field in fields(kind)}
    given = {**{name: value for name, value in who.items() if name in known}, **said}
    unsaid = {name: UNSAID[name] for name, is_required in known.items() if is_required and name not in given}
    return decode_call(encode(kind(**unsaid, **given)))


def reply_fields(reply: Message, data: bytes) -> dict[str, Any]:
    """Return the fields of a reply, and of the body that it travelled as, as plain values."""
    if isinstance(reply, Status):
        return status_fields(reply)
    fields: dict[str, Any] = unpackb(data)
    if isinstance(reply, Events):
        fields["events"] = list(map(event_fields, reply.events))
    if isinstance(reply, NothingStored):
        return {"step": None, **({"lost": reply.lost} if reply.lost else {})}
    fields |= fields.pop("report", None) or {}
    fields.pop("k", None)
    return fields
