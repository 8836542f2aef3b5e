"""A place in an object store, opened: its objects are listed, read, written and removed.

The library (obstore, in Rust) signs, retries and cuts large uploads into parts; it is imported only
here. An object appears whole or not at all: an upload that is cut off between two parts leaves what
was there before. All names are relative to the place.

The library reads AWS_* from the environment, and so does this file, to say which server is meant.
"""

import ipaddress
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from samecurve.core.system.installation import install_command
from samecurve.errors import RunError, UserError
from samecurve.storage.failures import Attempted, StorageError, explain
from samecurve.storage.listing import has_objects, list_objects
from samecurve.storage.url import ObjectUrl
from samecurve.terminal import echo

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")
_PART = 5 << 20  # bytes of one part of an upload; S3 takes none smaller
_MOST_PARTS = 9_000  # S3 takes 10,000
_PARALLEL = 4  # parts on their way at once
_RANGE = 16 << 20  # bytes of one read of a download
_CONNECT = timedelta(seconds=5)
_ANSWER = timedelta(seconds=120)  # for a part, through a slow line
_SILENT = 3.0  # seconds of a start after which the user is told what is waited for
_RETRIES: "RetryConfig" = {
    "max_retries": 1000,  # the time is the limit, whatever the failure
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=3),
        "base": 2,
    },
}


@dataclass(frozen=True)
class StoredObject:
    """An object as the store lists it."""

    name: str  # within its place
    size: int
    etag: str  # changes with the content
    modified: float  # seconds since 1970, by the store's clock


class Place:
    """The objects whose names begin with a URL's. Threads may share it.

    StorageError: any method may raise it, once the library has tried again in vain.
    """

    def __init__(self, url: ObjectUrl) -> None:
        self.url = url
        self._process = os.getpid()
        from obstore.store import S3Store

        options: ClientConfig = {"connect_timeout": _CONNECT, "timeout": _ANSWER}
        endpoint = _endpoint()
        if _is_loopback(endpoint):
            options["allow_http"] = True
        self._endpoint = urlsplit(endpoint).hostname or ""
        try:
            self._store = S3Store(url.bucket, client_options=options, retry_config=_RETRIES)
        except Exception as error:
            raise self._explained(error, "opening", "") from None

    def check(self) -> None:
        """See that the place can be reached and listed."""
        key = self._key("lease.json")  # few objects begin so
        self._call("opening", "", lambda: has_objects(self._store, key, f"opening {self.url}"))

    def list(self, under: str = "") -> dict[str, StoredObject]:
        """The objects by name. under: what the names begin with"""
        what = f"listing {self.url / under if under else self.url}"
        prefix = self._key(under)
        found = self._call("listing", under, lambda: list_objects(self._store, prefix, what))
        objects = {}
        for meta in found:
            name = meta["path"].removeprefix(self.url.prefix).lstrip("/")
            objects[name] = StoredObject(
                name, meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp()
            )
        return objects

    def read(self, name: str) -> bytes:
        """The whole content of a small object."""
        return self.read_tagged(name)[0]

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """The content of a small object, and the tag that write() takes as `replacing`."""
        import obstore

        def both() -> tuple[bytes, str]:
            answer = obstore.get(self._store, self._key(name))
            return bytes(answer.bytes()), answer.meta["e_tag"] or ""

        return self._call("reading", name, both)

    def write(self, name: str, content: bytes, *, replacing: str | None = None) -> str:
        """Write an object at once. Returns its tag.

        replacing: the tag of the object that this one may replace; '': there must be none; None:
            whatever is there. Another content is a StorageError of kind "conflict".
        """
        import obstore

        mode: Any = "overwrite"
        if replacing is not None:
            mode = {"e_tag": replacing} if replacing else "create"

        def put() -> str:
            key = self._key(name)
            answer = obstore.put(self._store, key, content, mode=mode, use_multipart=False)
            return answer["e_tag"] or ""

        return self._call("writing", name, put)

    def upload(self, name: str, file: Path) -> None:
        """Write a file as an object, in parts if it is large."""
        import obstore

        part = max(_PART, -(-file.stat().st_size // _MOST_PARTS))

        def put() -> None:
            obstore.put(
                self._store, self._key(name), file, chunk_size=part, max_concurrency=_PARALLEL
            )

        self._call("uploading", name, put)

    def download(self, name: str, size: int, file: Path, *, etag: str = "") -> None:
        """Read an object of this size into a new file, several ranges at once.

        etag: as read_range()
        """
        begins = range(0, size, _RANGE)
        with open(file, "wb") as opened, ThreadPoolExecutor(_PARALLEL) as threads:
            descriptor = opened.fileno()

            def read(begin: int) -> None:
                content = self.read_range(name, begin, min(_RANGE, size - begin), etag=etag)
                os.pwrite(descriptor, content, begin)

            for _ in threads.map(read, begins):
                pass
            os.fsync(descriptor)

    def read_range(self, name: str, begin: int, size: int, *, etag: str = "") -> bytes:
        """Bytes [begin, begin + size) of an object.

        etag: the tag that it must have; '': any. Another one is a StorageError of kind "conflict".
        """
        import obstore

        options: Any = {"range": (begin, begin + size)}
        if etag:
            options["if_match"] = etag

        def get() -> bytes:
            return bytes(obstore.get(self._store, self._key(name), options=options).bytes())

        return self._call("reading", name, get)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in this order. One that is gone already is no error."""
        import obstore

        for name in names:
            try:
                self._call("removing", name, partial(obstore.delete, self._store, self._key(name)))
            except StorageError as error:
                if error.kind != "missing":
                    raise

    def _key(self, name: str) -> str:
        return f"{self.url.prefix}/{name}".strip("/") if self.url.prefix else name

    def _check_process(self) -> None:
        """RunError: this process was forked since; the library's threads are not in it."""
        if os.getpid() != self._process:
            raise RunError(
                f"a forked process can't reach {self.url}",
                "data.workers: 0 (--num-workers 0), where threads read; or cache_bytes of"
                " samecurve.Shards, large enough for all shards",
                "data",
            )

    def _call(self, what: str, name: str, call: Callable[[], T]) -> T:
        self._check_process()
        try:
            return call()
        except StorageError:
            raise
        except OSError as error:
            if type(error) is not FileNotFoundError or error.filename is not None:
                raise  # of the local file
            raise self._explained(error, what, name) from None
        except Exception as error:
            raise self._explained(error, what, name) from None

    def _explained(self, error: BaseException, what: str, name: str) -> StorageError:
        place = str(self.url / name if name else self.url)
        return explain(error, Attempted(what, place, self.url.bucket, self._endpoint))


def open_place(url: ObjectUrl, where: str) -> Place:
    """Open a place, and see that it can be listed. where: the flag or key that has the URL

    UserError: the library is missing, or the store knows no such bucket or refuses the
    credentials. StorageError: it can't be reached.
    """
    check_installed(where)
    place = Place(url)
    seconds = f"{_RETRIES['retry_timeout'].total_seconds():.0f} s"
    words = f"store  {url} does not answer as it should; requests are repeated for {seconds}"
    waiting = threading.Timer(_SILENT, partial(echo, words, err=True))
    waiting.daemon = True
    waiting.start()
    try:
        place.check()
    except StorageError as error:
        raise error.as_user_error(where) from None
    finally:
        waiting.cancel()
    return place


def check_installed(where: str) -> None:
    """UserError: obstore is not installed."""
    if find_spec("obstore") is None:
        raise UserError("s3:// needs obstore: not installed", install_command("s3"), where)


def _endpoint() -> str:
    """The server that the user has named; '': Amazon's own."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
