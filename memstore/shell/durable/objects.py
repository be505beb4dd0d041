"""Durable files as objects of an object store (R31): names are those of `memstore/core/durable/paths.py`.

An object appears whole or not at all, so one PUT replaces a directory's renames and syncs, and it is made
only if there is none of that name. Credentials are found by obstore in the environment or the instance's
metadata; they are in no configuration, message or file of ours.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from memstore.core.durable.paths import is_step_number, step_path
from memstore.core.durable.slice_format import SLICE_LIMIT_BYTES
from memstore.core.durable.storage_ports import DurableFiles, DurableReader, Wrote
from memstore.errors import CapacityError, ConfigError, IntegrityError, MemstoreError, TransportError
from memstore.shell.durable.files import PROBE_TEXT
from recovery.inventory import StepId

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Each with a variable to begin with; its first word is the cloud's in the names of all others.
SCHEMES = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_NAME"}
_PROBE = ".probe"  # starts with a dot, as no job does
_START_BYTES = 4096  # of an object, read when it is opened: more than a slice's header
# A request that takes longer is tried again, and one that fails for longer is given up: the write waits for the next
# durable step, the restore asks again. A slice of 64 MiB needs 0.6 MB/s.
_REQUEST_S, _CONNECT_S, _RETRY_S, _RETRIES = SLICE_LIMIT_BYTES / 600e3, 5.0, 60.0, 8
_BACKOFF_S = (0.1, 10.0)
_STATUS = re.compile(r"\bcode: (\d{3})")
_QUERY = re.compile(r"\?\S+")  # of a signed URL: not for logs
_ANSWER = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<\n]*))?")  # what else stands there may be a secret
_FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "container does not exist")
_DELETES = 1000  # in one call


class ObjectFiles(DurableFiles):
    """Objects below a URL that every host of the job reaches."""

    def __init__(self, url: str) -> None:
        """Name the place; nothing is asked of it until the first call.

        Raises:
            ConfigError: obstore is not installed, a URL with credentials, a query or a fragment, or no bucket.
        """
        self.where = check_url(url)
        self.store = _store(self.where)
        self._readers: dict[str, _ObjectReader] = {}  # an object never changes: its start is read once

    def path(self, job: str, *names: object) -> str:
        """Return an URL for messages; see `step_path`."""
        return step_path(self.where, job, *names)

    def probe(self, name: str = "", *, is_kept: bool = False) -> None:
        """Write an object, read it back and remove it."""
        import obstore

        key = f"{_PROBE}/{name or secrets.token_hex(8)}"
        try:
            with mapped("write", f"{self.where}/{key}"):
                obstore.put(self.store, key, PROBE_TEXT, use_multipart=False)
                if bytes(obstore.get(self.store, key).bytes()) != PROBE_TEXT:
                    raise IntegrityError(f"{key} reads otherwise than it was written")
                if not is_kept:
                    obstore.delete(self.store, key)
        except MemstoreError as exc:
            raise ConfigError(
                f"durable={self.where!r} cannot be written on this host: {exc}; "
                "create the bucket, give the credentials in the holder's environment the right to put, get, list and "
                "delete, or choose another place",
                path=self.where,
            ) from exc

    def probes(self) -> set[str]:
        """Return the names of the probes that are there."""
        import obstore

        with mapped("list", f"{self.where}/{_PROBE}"):
            found = [str(meta["path"]) for metas in obstore.list(self.store, _PROBE) for meta in metas]
        return {name.removeprefix(_PROBE + "/") for name in found}

    def write(
        self,
        job: str,
        step: StepId,
        name: str,
        pieces: Sequence[bytes | memoryview],
        *,
        should_stop: Callable[[], bool],
        is_once: bool,
    ) -> Wrote:
        """Put an object, in one request."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

        path, key = self.path(job, step.attempt, step.step, name), _key(job, step, name)
        if should_stop():
            return "stopped"
        whole = [piece for piece in pieces if len(piece)]
        mode: Literal["create", "overwrite"] = "create" if is_once else "overwrite"
        with mapped("write", path):
            for is_again in (False, True):
                try:
                    obstore.put(self.store, key, whole, use_multipart=False, mode=mode)
                    break
                except AlreadyExistsError:
                    if mode == "overwrite":  # Azure says so as well of an object that is locked
                        raise
                    return "there"
                except (
                    NotImplementedError,
                    NotSupportedError,
                ):  # no conditional puts: names hold digests, nothing is mixed up
                    if is_again:
                        raise
                    mode = "overwrite"
                except BaseError as exc:  # obstore does not repeat a creation of which no answer came
                    said = str(exc).partition("\n")[0]
                    if is_again or _STATUS.search(said) or "max_retries" in said:
                        raise
        self._readers.pop(key, None)
        return "written"

    @contextmanager
    def opened(self, job: str, step: StepId, name: str) -> Iterator[DurableReader]:
        """Open an object: its size and first bytes are read."""
        path, key = self.path(job, step.attempt, step.step, name), _key(job, step, name)
        reader = self._readers.get(key)
        if reader is None:
            reader = self._readers[key] = _ObjectReader(self.store, key, path)
        yield reader

    def names(self, job: str, step: StepId) -> set[str]:
        """Return the objects of a step."""
        import obstore

        path, key = self.path(job, step.attempt, step.step), _key(job, step)
        with mapped("list", path):
            found = [str(meta["path"]) for metas in obstore.list(self.store, key, chunk_size=1000) for meta in metas]
        return {name.removeprefix(key + "/") for name in found}

    def has(self, job: str, step: StepId, name: str) -> bool:
        """Ask for the object's head."""
        import obstore

        try:
            with mapped("read", self.path(job, step.attempt, step.step, name)):
                obstore.head(self.store, _key(job, step, name))
        except IntegrityError:
            return False
        return True

    def steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's steps, oldest first; nothing can lie in the way of one."""
        self.path(job)
        attempts = [int(name) for name in self._folders(job) if is_step_number(name)]
        steps = [
            StepId(attempt, int(name))
            for attempt in attempts
            for name in self._folders(f"{job}/{attempt}")
            if is_step_number(name)
        ]
        return sorted(steps), []

    def remove(self, job: str, step: StepId, names: Collection[str]) -> None:
        """Remove objects, many in one request."""
        import obstore

        path, ours = self.path(job, step.attempt, step.step), [_key(job, step, name) for name in sorted(names)]
        for at in range(0, len(ours), _DELETES):
            keys = ours[at : at + _DELETES]
            try:
                with mapped("remove", path):
                    obstore.delete(self.store, keys)
            except IntegrityError:  # Google and Azure stop at one that is gone; S3 does not
                for key in keys:
                    with suppress(IntegrityError), mapped("remove", path):
                        obstore.delete(self.store, key)
        self._readers.clear()

    def tidy(self, job: str, step: StepId) -> None:
        """Do nothing: an object is never partial."""

    def _folders(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix that have something below them."""
        import obstore

        with mapped("list", self.where):
            found = obstore.list_with_delimiter(self.store, prefix)["common_prefixes"]
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]


class _ObjectReader(DurableReader):
    """One object: its size, its first bytes, and ranges of the rest."""

    def __init__(self, store: ObjectStore, key: str, path: str) -> None:
        import obstore

        self.store, self.key, self.path = store, key, path
        with mapped("read", path):
            got = obstore.get(store, key, options={"range": (0, _START_BYTES)})
            self.nbytes, self.start = int(got.meta["size"]), bytes(got.bytes())

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`."""
        import obstore

        end = offset + view.nbytes
        if end > self.nbytes:
            raise IntegrityError(f"{self.path} ends at byte {self.nbytes}, {end - self.nbytes} more were promised")
        if end <= len(self.start):
            view[:] = self.start[offset:end]
            return
        with mapped("read", self.path):
            got = memoryview(obstore.get_range(self.store, self.key, start=offset, end=end))
            if got.nbytes != view.nbytes:
                raise TransportError(f"{self.path}: {got.nbytes} bytes came of {view.nbytes} from byte {offset}")
            view[:] = got


def check_url(url: str) -> str:
    """Return an object store's URL without a slash at its end.

    Raises:
        ConfigError: it has credentials, a query, a fragment, no bucket, or steps upwards. Nothing of it that may be
            a secret is repeated.
    """
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"durable: {exc}: it is no URL") from exc
    if "@" in url or parts.query or parts.fragment:  # anywhere: a secret key may have a slash in it
        raise ConfigError(
            f"durable={parts.scheme}://...: credentials, queries and fragments have no place in it, for it is logged "
            f"and stored; write {parts.scheme}://bucket/folder, and put {SCHEMES[parts.scheme]} and the like into "
            "the environment of the holders"
        )
    names = parts.path.split("/")
    if not parts.netloc or ".." in names or "." in names or "" in names[1:-1] or not url.isprintable():
        raise ConfigError(f"durable={url!r}: write {parts.scheme}://bucket/folder")
    return url.rstrip("/")


@contextmanager
def mapped(action: str, path: str) -> Iterator[None]:
    """Turn an error of the object store into the memstore error for it; memstore's own errors pass."""
    import obstore.exceptions as theirs

    try:
        yield
    except MemstoreError:
        raise
    except (theirs.BaseError, OSError, ValueError) as exc:
        text = str(exc)
        first = re.split(r"[<\n]", text)[0]
        status, answer = _STATUS.search(first), _ANSWER.search(text)
        said = " ".join(filter(None, answer.groups())) if answer else ""
        what = f"cannot {action} {path}: {_QUERY.sub('?...', first)[:500]}{said[:200]}"
        code = int(status[1]) if status else 0
        if code == 507 or any(word in text for word in _FULL):
            raise CapacityError(f"{what}: free room there, or lower durable_keep", path=path) from exc
        if code in (401, 403) or any(word in text for word in _NO_BUCKET):
            raise ConfigError(f"{what}: create the bucket, or correct the holder's credentials", path=path) from exc
        if "builder error" in first:  # obstore's words for http:// where that is not allowed
            raise ConfigError(f"{what}: set {_allows_http(path)}=true, or an endpoint with TLS", path=path) from exc
        if isinstance(exc, FileNotFoundError) or code == 416:
            raise IntegrityError(f"{what}: it is gone, or shorter than it was", path=path) from exc
        raise TransportError(f"{what}: nothing is known about the bytes, it may be tried again", path=path) from exc


@functools.lru_cache(maxsize=8)
def _store(url: str) -> ObjectStore:
    """Return the store behind a URL; all users share its connections and credentials."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as exc:
        raise ConfigError(f"durable={url!r} needs the package obstore on every host: pip install obstore") from exc
    retry: Any = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_S),
        "backoff": {"init_backoff": timedelta(seconds=_BACKOFF_S[0]), "max_backoff": timedelta(seconds=_BACKOFF_S[1])},
    }
    client: Any = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        # obstore reads this one from the environment only where no client option is given.
        "allow_http": os.environ.get(_allows_http(url), "").lower() in ("1", "true"),
    }
    try:
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as exc:
        said, variable = str(exc).partition("\n")[0], SCHEMES[urlsplit(url).scheme]
        raise ConfigError(
            f"durable={url!r} is no object store that can be used: {said}; correct {variable} and the like in the "
            "environment of the holders"
        ) from exc


def _allows_http(url: str) -> str:
    """Return the name of the variable."""
    return SCHEMES[urlsplit(url).scheme].partition("_")[0] + "_ALLOW_HTTP"


def _key(job: str, step: StepId, *names: str) -> str:
    return "/".join((job, str(step.attempt), str(step.step), *names))
