"""Files of which parts are read, few of them open at a time."""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from samecurve.data.shards.index import Shard, check_unchanged
from samecurve.errors import RunError

_OPEN = 64


class OpenFiles:
    """Open shards, by number. Threads and forked processes may share them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._descriptors)

    def read(self, number: int, begin: int, size: int) -> bytes:
        """Read bytes [begin, begin + size). RunError: the file has changed since it was indexed."""
        if (stored := self._read_stored(number, begin, size)) is not None:
            return stored
        with self._lock:
            descriptor = self._descriptors.get(number)
            if descriptor is None:
                descriptor = self._open(number)
            self._descriptors.move_to_end(number)
            parts, missing = [], size
            while missing and (part := os.pread(descriptor, missing, begin + size - missing)):
                parts.append(part)
                missing -= len(part)
        if missing:
            raise RunError(
                f"{self._shards[number].path} ends before byte {begin + size}",
                "it was cut while it was read: restore it, and run the same command again",
                "data",
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_stored(self, number: int, begin: int, size: int) -> bytes | None:
        """Bytes of an object without a copy on this machine; None: there is a copy, or a file.

        RunError: the object has changed since it was indexed, or the store can't be reached.
        """
        shard = self._shards[number]
        if shard.stored is None or number in self._descriptors or shard.path.is_file():
            return None
        from samecurve.storage.failures import StorageError

        try:
            return shard.stored.read_range(begin, size)
        except StorageError as error:
            if error.kind != "conflict":
                raise
            raise RunError(
                f"{shard.stored.url} has changed since it was indexed",
                "run the same command again, once nothing writes to the objects",
                "data",
            ) from None

    def _open(self, number: int) -> int:
        shard = self._shards[number]
        descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            check_unchanged(shard, os.fstat(descriptor))
        except RunError:
            os.close(descriptor)
            raise
        self._descriptors[number] = descriptor
        if len(self._descriptors) > _OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
