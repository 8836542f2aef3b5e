"""A listing of a store's objects that ends, whatever the store answers.

A listing comes in pages, each of which may say that there is another one. The library asks for the
next page for as long as the store says so, and gives nothing back while pages are empty.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from samecurve.storage.failures import StorageError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

T = TypeVar("T")
_MOST_OBJECTS = 2_000_000
_MOST_SECONDS = 600.0  # for a whole listing
_QUIET = 150.0  # seconds until the next objects: a request may take 120, and is repeated for 20


def list_objects(store: "S3Store", prefix: str, what: str) -> "list[ObjectMeta]":
    """All objects whose names begin so. what: the attempt in words, such as `listing s3://b/x`

    StorageError: the listing does not end. What the library raises is raised as it is.
    """
    return _run(_listed(store, prefix, what))


def has_objects(store: "S3Store", prefix: str, what: str) -> bool:
    """Whether the store can be listed and has an object whose name begins so. Raises as above."""

    async def look() -> bool:
        import obstore

        return await _next(obstore.list(store, prefix or None, chunk_size=1), what) is not None

    return _run(look())


async def _listed(store: "S3Store", prefix: str, what: str) -> "list[ObjectMeta]":
    import obstore

    objects: dict[str, ObjectMeta] = {}
    batches, count, began = obstore.list(store, prefix or None), 0, time.monotonic()
    while (batch := await _next(batches, what)) is not None:
        objects.update({meta["path"]: meta for meta in batch})
        count += len(batch)
        if len(objects) < count:
            raise _endless(what, "the store lists objects a second time")
        if count > _MOST_OBJECTS:
            raise _endless(what, f"there are more than {_MOST_OBJECTS:,} objects")
        if time.monotonic() - began > _MOST_SECONDS:
            raise _endless(what, f"{count:,} objects in {_MOST_SECONDS:.0f} s, and no end")
    return list(objects.values())


async def _next(batches: Any, what: str) -> Any:
    """The next objects; None: the listing has ended. StorageError: nothing comes."""
    try:
        async with asyncio.timeout(_QUIET):
            return await anext(batches, None)
    except TimeoutError:
        raise _endless(what, f"no object in {_QUIET:.0f} s, and no end") from None


def _endless(what: str, why: str) -> StorageError:
    return StorageError(
        f"{what}: the listing does not end: {why}",
        "an address with fewer objects, or a narrower glob; if there are few, see the store's own"
        " log: it may answer wrongly",
    )


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, from a loop in a thread of its own: this thread may have a loop.

    Ctrl-C leaves the thread behind, which ends with the process.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(work))
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="listing", daemon=True).start()
    return future.result()
