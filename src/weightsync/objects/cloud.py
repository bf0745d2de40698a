"""CloudStore: S3, Google Cloud Storage, Azure and memory, through `obstore`. What it raises is typed here, once.

obstore's own repetitions are off: `Repeating` repeats, with one deadline over all of them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from weightsync.errors import (
    ObjectConflictError,
    ObjectMissingError,
    StoreAuthError,
    StoreDamagedError,
    StoreUnavailableError,
    WeightSyncError,
)
from weightsync.objects.base import MAX_SMALL_BYTES, Data, Found, Listed
from weightsync.optional import imported
from weightsync.types import Deadline
from weightsync.types.store import check_key

_CHUNK_BYTES = 16 << 20
_MAX_PARTS = 10_000
"""S3 and Google Cloud Storage take no more of one object."""
_STALL_S = 30.0
_REQUEST_STALLS = 10
"""No request takes longer than so many stalls, though bytes flow."""
_GENERATION = "\n"
_QUERY = re.compile(r"\?[^\s\"')]+")
_STATUS = re.compile(r"status code: (\d{3})")
_CREDENTIAL = re.compile(r"ExpiredToken|InvalidToken|TokenRefreshRequired|RequestTimeTooSkewed|InvalidAccessKeyId")
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_memory: dict[str, Any] = {}
_memory_lock = threading.Lock()


class CloudStore:
    """See `ObjectStore`. Credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, ...).

    Args:
        url: s3://bucket/path, gs://, az://, memory://name/path.
        stall_s: a call in which nothing comes for so long has failed. A request of `put_large` has ten times as long:
            nothing comes while it sends.

    Raises:
        MissingDependencyError: obstore is not installed.
        StoreAuthError: there is no credential that could be used.
    """

    def __init__(self, url: str, *, stall_s: float = _STALL_S) -> None:
        self.url = url
        needs = f"{url} needs the package obstore: pip install 'weightsync[store]'; a folder (file://) needs nothing"
        self._errors = imported("obstore", needs).exceptions
        from_url = imported("obstore.store", needs).from_url
        with _typed(self.url, self._errors):
            if url.startswith("memory://"):
                self._store = self._large = _memory_store(url)
            else:
                stall = datetime.timedelta(seconds=stall_s)
                large: Any = {
                    "allow_http": any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS),
                    "connect_timeout": datetime.timedelta(seconds=5), "timeout": _REQUEST_STALLS * stall,
                }  # fmt: skip
                retry: Any = {
                    "max_retries": 0, "retry_timeout": stall,
                    "backoff": {
                        "init_backoff": datetime.timedelta(seconds=0.1),
                        "max_backoff": datetime.timedelta(seconds=1), "base": 2,
                    },
                }  # fmt: skip
                small: Any = {**large, "read_timeout": stall}
                self._store = from_url(url, client_options=small, retry_config=retry)
                self._large = from_url(url, client_options=large, retry_config=retry)

    def get(self, key: str, *, deadline: Deadline, unless: str | None = None) -> Found | None:
        with self._asked(key, deadline):
            try:
                options: Any = {} if unless is None else {"if_none_match": unless.partition(_GENERATION)[0]}
                answer = self._store.get(key, options=options)
            except self._errors.NotModifiedError:
                return None
            if answer.meta["size"] > MAX_SMALL_BYTES:
                raise StoreDamagedError(f"{self.url}/{key} is too long to be what it should be")
            return Found(data=bytes(answer.bytes()), etag=self._etag(answer.meta))

    def get_range(self, key: str, start: int, into: memoryview, *, deadline: Deadline) -> None:
        with self._asked(key, deadline):
            data = memoryview(self._store.get_range(key, start=start, length=len(into)))
            if len(data) != len(into):
                raise StoreDamagedError(f"{self.url}/{key} ends at byte {start + len(data)}: it is cut off")
            into[:] = data

    def put(self, key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        with self._asked(key, deadline):
            mode: Any = "create"
            if replaces is not None:
                e_tag, _, generation = replaces.partition(_GENERATION)
                mode = {"e_tag": e_tag, **({"version": generation} if generation else {})}
            return self._etag(self._store.put(key, bytes(data), mode=mode, use_multipart=False))

    def put_large(self, key: str, data: Data, *, deadline: Deadline) -> None:
        view = memoryview(data).cast("B")
        part_bytes = _part_bytes(len(view))

        def pieces() -> Iterator[bytes]:
            for start in range(0, len(view), part_bytes):
                deadline.check("end of a write", peer=self.url)
                yield bytes(view[start : start + part_bytes])

        with self._asked(key, deadline):
            if len(view) <= part_bytes:
                self._large.put(key, bytes(view), use_multipart=False)
            else:
                self._large.put(key, pieces(), use_multipart=True, chunk_size=part_bytes, max_concurrency=4)

    def delete(self, keys: Iterable[str], *, deadline: Deadline) -> None:
        for key in keys:
            with contextlib.suppress(ObjectMissingError), self._asked(key, deadline, "end of a deletion"):
                self._store.delete(key)

    def list_under(self, prefix: str, *, deadline: Deadline) -> Iterator[Listed]:
        with _typed(f"{self.url}/{prefix}", self._errors):
            for batch in self._store.list(prefix=prefix or None):
                deadline.check("end of a listing", peer=self.url)
                for each in batch:
                    yield Listed(key=each["path"], nbytes=each["size"])

    @contextlib.contextmanager
    def _asked(self, key: str, deadline: Deadline, awaited: str = "answer of the store") -> Iterator[None]:
        check_key(key)
        deadline.check(awaited, peer=self.url)
        with _typed(f"{self.url}/{key}", self._errors):
            yield

    def _etag(self, meta: Any) -> str:
        """Google Cloud Storage compares an object's generation when it is replaced, the others its etag."""
        e_tag = str(meta["e_tag"] or "")
        generation = meta.get("version") if self.url.startswith("gs://") else None
        return f"{e_tag}{_GENERATION}{generation}" if generation else e_tag


def _part_bytes(nbytes: int) -> int:
    """Of one part of an object of so many bytes: whole MiB."""
    return max(_CHUNK_BYTES, -(-nbytes // (_MAX_PARTS << 20)) << 20)


def _memory_store(url: str) -> Any:
    from obstore.store import MemoryStore

    with _memory_lock:
        return _memory.setdefault(url, MemoryStore())


@contextlib.contextmanager
def _typed(what: str, errors: Any) -> Iterator[None]:
    try:
        yield
    except WeightSyncError:
        raise
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise StoreAuthError(f"{what}: there is no such bucket", peer=what) from error
        raise ObjectMissingError(f"there is no {what}", peer=what) from error
    except (errors.AlreadyExistsError, errors.PreconditionError) as error:
        if "404 Not Found" in str(error):
            raise ObjectConflictError(f"{what} is gone, and was to be replaced", peer=what) from error
        raise ObjectConflictError(f"{what} is another one than the condition names", peer=what) from error
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise StoreAuthError(f"{what}: the store refuses the credential: {_words(error)}", peer=what) from error
    except Exception as error:  # whatever else obstore raises
        text = str(error)
        if _CREDENTIAL.search(text):
            raise StoreAuthError(f"{what}: the store refuses the credential: {_words(error)}", peer=what) from error
        if "Invalid range" in text or ((status := _STATUS.search(text)) and status[1] == "416"):
            raise StoreDamagedError(f"{what} is shorter than it should be: it is cut off") from error
        raise StoreUnavailableError(f"{what}: {_words(error)}", peer=what) from error


def _words(error: Exception) -> str:
    """The first lines of what obstore says; what follows is for its developers. Without queries of URLs, which may be
    signatures."""
    return " ".join(_QUERY.sub("?...", str(error).partition("Debug source")[0]).split())[:400]
