"""Objects in an object store."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import functools
import itertools
import os
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import xxhash

from jobrunner.checkpoint.storage.protocol import (
    DOCUMENT_BYTES,
    Buffers,
    Item,
    Result,
    too_long,
)
from jobrunner.config import get_number
from jobrunner.texts import printable, without_credentials

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore, RetryConfig

MISSING = "object stores need obstore, which is not installed: pip install 'dask-jobrunner[object]'"

_RETRY_KEY = "checkpoint.retry-seconds"
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 5.0
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")


@functools.cache
def open_store(root: str) -> ObjectStore:
    """The objects below a URL, with the credentials of this process's environment.

    Cached by URL, so that a process shares connections and the content of ``memory://``.
    """
    from obstore.store import MemoryStore, from_url

    if root.startswith("memory://"):
        return MemoryStore()
    # For a time, however often.
    retrying: RetryConfig = {
        "max_retries": 1_000_000,
        "retry_timeout": dt.timedelta(seconds=get_number(_RETRY_KEY)),
        "backoff": {
            "init_backoff": dt.timedelta(seconds=_PAUSE_SECONDS),
            "max_backoff": dt.timedelta(seconds=_LONGEST_PAUSE_SECONDS),
            "base": 2,
        },
    }
    return from_url(root, retry_config=retrying)


class ObjectFiles:
    """Objects below `root`, the URL of the checkpoint directory; see `Files`.

    `open_store`, which must be picklable, returns the store of that URL, with keys relative to it;
    it is called once per process.

    There are no directories and no links: the store copies objects. An object is whole and durable
    once the store has replied. Log entries require conditional creation, and histories conditional
    replacement; `prove_creation` and `prove_appending` test them before a run begins. Pickles
    contain the URL, never credentials.
    """

    threads = 8
    lookups = 32
    linked_bytes = 4 << 20  # a link waits for the store twice, a write only once
    appended_bytes = 256 << 10  # read and put again for each part

    def __init__(self, root: str, open_store: Callable[[str], ObjectStore] = open_store) -> None:
        self.root = root
        self._open_store = open_store
        self._opened: ObjectStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def before(self, operation: str, path: str) -> None:
        pass

    def reaches(self, path: str) -> bool:
        return path == self.root or path.startswith(f"{self.root}/")

    def each(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        with ThreadPoolExecutor(self.lookups, "jobrunner-requests") as pool:
            yield from pool.map(call, items)

    # --- requests

    def _ask(self, operation: str, path: str, request: Callable[[ObjectStore], Result]) -> Result:
        """Make a request; turns the store's errors into OSErrors."""
        self.before(operation, path)
        try:
            from obstore import exceptions
        except ImportError as error:
            raise OSError(errno.ENOSYS, MISSING, path) from error
        try:
            if self._opened is None:
                self._opened = self._open_store(self.root)
            return request(self._opened)
        except (FileNotFoundError, NotImplementedError, exceptions.BaseError) as error:
            raise self._translate(error, operation, path) from _presentable(error)

    def _translate(self, error: Exception, operation: str, path: str) -> OSError:
        from obstore import exceptions

        is_missing = isinstance(error, FileNotFoundError)
        # A missing object may be no fault, a missing bucket is one. Some stores do not say which of the
        # two is missing; but what creates an object can miss only the bucket.
        has_no_bucket = any(code in str(error) for code in _NO_BUCKET)
        if has_no_bucket or (is_missing and operation in ("put", "create")):
            noun = "container" if self.root.startswith("az:") else "bucket"
            name = urllib.parse.urlsplit(self.root).netloc
            problem = f"there is no {noun} {name!r}. Create it, or correct the URL"
            return OSError(errno.ENXIO, problem, path)
        if is_missing:
            return FileNotFoundError(errno.ENOENT, "no such object", path)
        if isinstance(error, exceptions.AlreadyExistsError):
            return FileExistsError(errno.EEXIST, "the object exists", path)
        if isinstance(error, exceptions.PreconditionError):
            return FileExistsError(errno.EEXIST, "another object is there now", path)
        refusals = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        number = errno.EACCES if isinstance(error, refusals) else errno.EIO
        return OSError(number, printable(str(error).partition("\n")[0]), path)

    def _key(self, path: str) -> str:
        if not self.reaches(path):
            raise OSError(errno.EINVAL, f"is not below {self.root}", path)
        return path[len(self.root) + 1 :]

    # --- writing

    def make_directory(self, path: str) -> None:
        pass

    def make_directories(self, path: str) -> None:
        pass

    def write(self, path: str, buffers: Buffers) -> str:
        content = b"".join(buffers)
        self.put(path, content)
        return xxhash.xxh3_128_hexdigest(content)

    def write_at(self, path: str, start: int, buffers: Buffers, nbytes: int) -> None:
        # A store has no append, so each part replaces the whole object. Say a request with the rows
        # up to 50 gets no answer; it is made again, and rows up to 70 follow, which are recorded.
        # Now the first request arrives, and takes rows 51 to 70 away. So each request names the
        # object from which it was made, and is refused if another one is there.
        data = b"".join(buffers)
        if not start and self.create(path, data.ljust(nbytes, b"\0")):
            return
        present, version = self._read_version(path)
        tail = present[start + len(data) : nbytes]
        whole = b"".join((present[:start], data, tail)).ljust(nbytes, b"\0")
        try:
            self._replace(path, whole, version)
        except OSError:
            if self.read(path) != whole:  # else only the answer was lost
                raise

    def _read_version(self, path: str) -> tuple[bytes, UpdateVersion]:
        """An object, and what `_replace` knows it by."""

        def get(store: ObjectStore) -> tuple[bytes, UpdateVersion]:
            result = store.get(self._key(path))
            version: Any = {}
            for name in ("e_tag", "version"):
                if result.meta[name] is not None:
                    version[name] = result.meta[name]
            return result.bytes().to_bytes(), version

        return self._ask("get", path, get)

    def _replace(self, path: str, data: bytes, version: UpdateVersion) -> None:
        """Replace an object; FileExistsError if it is not that version any more."""

        def put(store: ObjectStore) -> object:
            return store.put(self._key(path), data, mode=version, use_multipart=False)

        self._ask("put", path, put)

    def prove_appending(self, directory: str) -> None:
        path = os.path.join(directory, "appended")
        self.put(path, b"first")
        _, version = self._read_version(path)
        with contextlib.suppress(FileExistsError):  # a try with a cut answer has replaced it
            self._replace(path, b"second", version)
        try:
            self._replace(path, b"third", version)
        except FileExistsError:
            return
        raise OSError(
            errno.EOPNOTSUPP,
            "this store replaced an object that was not the expected one (conditional put with "
            "If-Match is missing or switched off), so rows of histories could get lost; use "
            "another store, or declare blobs without history=",
            path,
        )

    def link(self, source: str, target: str, nbytes: int) -> bool:
        def copy(store: ObjectStore) -> object:
            return store.copy(self._key(source), self._key(target))

        try:
            self._ask("copy", target, copy)
        except FileNotFoundError:
            return False
        if self._head(target)["size"] == nbytes:
            return True
        self.remove_file(target)
        return False

    def put(self, path: str, data: bytes, *, durable: bool = False) -> None:
        # In one request: what a store writes is divided into chunks already.
        self._ask("put", path, lambda store: store.put(self._key(path), data, use_multipart=False))

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._create(path, data)
        except OSError:
            # The store may fail, or find the name taken, after it has created the object.
            present = self.read(path)
            if present is None:
                raise
            return present == data
        return True

    def _create(self, path: str, data: bytes) -> None:
        """Create an object; FileExistsError, perhaps because a try with a cut answer made it."""
        self._ask("create", path, lambda store: store.put(self._key(path), data, mode="create"))

    def prove_creation(self, directory: str) -> None:
        path = os.path.join(directory, "created")
        with contextlib.suppress(FileExistsError):
            self._create(path, b"first")
        try:
            self._create(path, b"second")
        except FileExistsError:
            return
        raise OSError(
            errno.EOPNOTSUPP,
            "this store replaced an object that should only be created (conditional put is "
            "missing or switched off), but each entry of the log needs exactly one writer; use "
            "another store",
            path,
        )

    def remove_file(self, path: str) -> None:
        self._ask("delete", path, lambda store: store.delete(self._key(path)))

    def remove_tree(self, path: str) -> None:
        keys = [entry["path"] for entry in self._list(path)]
        if not keys:
            return
        try:
            self._ask("delete", path, lambda store: store.delete(keys))
        except FileNotFoundError:  # of one of them, in some stores
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self.remove_file(f"{self.root}/{key}")

    # --- durability

    def sync_path(self, path: str) -> None:
        pass

    @contextlib.contextmanager
    def making_durable(
        self, path: str, names: Collection[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        yield

    # --- reading

    def is_writable(self, path: str) -> bool:
        return True

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        def get(store: ObjectStore) -> bytes:
            result = store.get(self._key(path))
            size = int(result.meta["size"])
            if size > most:
                raise too_long(path, size, most)
            return result.bytes().to_bytes()

        try:
            return self._ask("get", path, get)
        except FileNotFoundError:
            return None

    def read_into(self, path: str, target: memoryview, nbytes: int) -> tuple[int, str]:
        def get(store: ObjectStore) -> tuple[int, str]:
            result = store.get(self._key(path))
            size = int(result.meta["size"])
            if size != nbytes:
                return size, ""
            data = memoryview(result.bytes())
            if target:
                target[:] = data[: len(target)]
            return size, xxhash.xxh3_128_hexdigest(data)

        return self._ask("get", path, get)

    def list_names(self, path: str) -> list[str]:
        level = self._list_level(path)
        keys = [*level["common_prefixes"], *(entry["path"] for entry in level["objects"])]
        return [key.rpartition("/")[2] for key in keys]

    def list_directories(self, path: str) -> list[str]:
        return [key.rpartition("/")[2] for key in self._list_level(path)["common_prefixes"]]

    def is_taken(self, path: str) -> bool:
        try:
            self._head(path)
        except FileNotFoundError:
            return self.is_directory(path)
        return True

    def is_directory(self, path: str) -> bool:
        prefix = self._key(path) or None
        return self._ask("list", path, lambda store: any(store.list(prefix, chunk_size=1)))

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        start = 0 if path == self.root else len(self._key(path)) + 1
        for entry in self._list(path):
            yield entry["path"][start:], entry["size"]

    def _head(self, path: str) -> Any:
        return self._ask("head", path, lambda store: store.head(self._key(path)))

    def _list_level(self, path: str) -> Any:
        prefix = self._key(path) or None
        return self._ask("list", path, lambda store: store.list_with_delimiter(prefix))

    def _list(self, path: str) -> list[Any]:
        """All objects below a path."""
        prefix = self._key(path) or None

        def collect(store: ObjectStore) -> list[Any]:
            return list(itertools.chain.from_iterable(store.list(prefix)))

        return self._ask("list", path, collect)


def _presentable(error: Exception) -> Exception | None:
    """The error as a cause, unless it contains credentials, as of an endpoint's URL."""
    text = str(error)
    return error if without_credentials(text) == text else None
