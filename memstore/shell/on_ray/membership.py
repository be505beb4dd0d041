"""Membership in Ray's GCS key-value store (R3, R17). Ray finds and names processes; nothing else goes through it."""

from __future__ import annotations

import json
from typing import Any

from ray.experimental import internal_kv

from memstore.errors import TransportError

NAMESPACE = b"memstore"


class RayMembership:
    """Records of one store under `<store>/hosts/` and `<store>/terms/`."""

    def __init__(self, store: str) -> None:
        self.store = store

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        """Register a holder's address."""
        self._put(f"hosts/{host_id}", json.dumps(record).encode(), overwrite=True)

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return every announced holder by host id."""
        found = {}
        for name in self._list("hosts/"):
            data = self._get(f"hosts/{name}")
            if data is not None:
                found[name] = json.loads(data)
        return found

    def withdraw(self, host_id: str) -> None:
        """Remove a host that left for good."""
        self._call(internal_kv._internal_kv_del, self._key(f"hosts/{host_id}"), namespace=NAMESPACE)

    def claim_term(self, above: int) -> int:
        """Take a term above every one claimed: put if absent (R17)."""
        term = max(above, self.newest_term()) + 1
        while self._put(f"terms/{term:012d}", b"1", overwrite=False):
            term += 1
        return term

    def newest_term(self) -> int:
        """Return the highest term claimed so far."""
        return max((int(name) for name in self._list("terms/")), default=0)

    def _key(self, name: str) -> bytes:
        return f"{self.store}/{name}".encode()

    def _put(self, name: str, value: bytes, *, overwrite: bool) -> bool:
        """Store a value; True if the key was there already."""
        return bool(
            self._call(internal_kv._internal_kv_put, self._key(name), value, overwrite=overwrite, namespace=NAMESPACE)
        )

    def _get(self, name: str) -> bytes | None:
        value = self._call(internal_kv._internal_kv_get, self._key(name), namespace=NAMESPACE)
        return value if isinstance(value, bytes) else None

    def _list(self, prefix: str) -> list[str]:
        keys = self._call(internal_kv._internal_kv_list, self._key(prefix), namespace=NAMESPACE)
        return sorted(key.decode().removeprefix(f"{self.store}/{prefix}") for key in keys)

    def _call(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return work(*args, **kwargs)
        except Exception as exc:
            raise TransportError(f"Ray's key-value store did not answer: {exc}") from exc
