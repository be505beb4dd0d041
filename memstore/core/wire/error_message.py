"""An error of the other side: the body of an ERROR frame. Pure.

It names a class of `memstore.errors`, a message and plain context values: no traceback, no pickle, and no class that a
peer could choose outside that tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memstore import errors
from memstore.core.wire.codec import Decoder, Message, Scalar

MESSAGE_CHARS_MAX = 16 << 10
CONTEXT_ITEMS_MAX = 64
_U64_MAX = (1 << 64) - 1


class ErrorMessage(Message, frozen=True, tag="error"):
    """An error, to be raised at the other side as the same class."""

    error: str
    """Its class; a MemstoreError stands for one that is not known here."""
    message: str
    context: dict[str, Scalar | list[Scalar]]
    """Its plain attributes, by name."""

    @classmethod
    def of(cls, error: BaseException) -> ErrorMessage:
        """Describe an error; one that is no MemstoreError becomes an InternalError that names its type."""
        known = isinstance(error, errors.MemstoreError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(
            error=type(error).__name__ if known else errors.InternalError.__name__,
            # A file name in a message may hold bytes that are not UTF-8.
            message=message[:MESSAGE_CHARS_MAX].encode(errors="replace").decode(),
            context=_plain_context(vars(error)) if known else {},
        )

    def rebuilt(self) -> errors.MemstoreError:
        """Return the error as its class."""
        error = _ERRORS.get(self.error, errors.MemstoreError)(self.message[:MESSAGE_CHARS_MAX])
        error.__dict__.update(_plain_context(self.context))
        return error


decode_error: Decoder[ErrorMessage] = Decoder(ErrorMessage)

_ERRORS: dict[str, type[errors.MemstoreError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.MemstoreError)
}


def _plain_context(context: Mapping[Any, Any]) -> dict[str, Scalar | list[Scalar]]:
    """Keep what needs no class to be read again: scalars, and flat lists of scalars, under plain attribute names."""
    plain: dict[str, Scalar | list[Scalar]] = {}
    for name, value in context.items():
        if len(plain) == CONTEXT_ITEMS_MAX:
            break
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            continue
        values = list(value[:CONTEXT_ITEMS_MAX]) if isinstance(value, (list, tuple)) else [value]
        if all(_is_plain(item) for item in values):
            plain[name] = values if isinstance(value, (list, tuple)) else value
    return plain


def _is_plain(value: Any) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value <= _U64_MAX
    if type(value) is str:
        return len(value) <= MESSAGE_CHARS_MAX and value.encode(errors="replace").decode() == value
    return value is None or type(value) in (float, bool)
