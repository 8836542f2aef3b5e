"""Shards that are objects in a store: their copies on this machine, and their names in errors."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samecurve.data.shards.index import Shard
from samecurve.errors import SamecurveError, UserError
from samecurve.storage.object_cache import StoredFile, bring, first_that_fit
from samecurve.units import parse_bytes


class BroughtShards(Sequence[Shard]):
    """Shards whose files are brought, one by one, as they are iterated over."""

    def __init__(self, shards: Sequence[Shard], limit: int) -> None:
        self._shards, self._limit = shards, limit

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]
        return self._shards[number]

    def __iter__(self) -> Iterator[Shard]:
        for shard in self._shards:
            if shard.stored is not None:
                bring(shard.stored, self._limit)
            yield shard


class Stored:
    """The objects among the files of a samecurve.Shards. UserError: cache_bytes is no size."""

    def __init__(self, files: Sequence[Path | StoredFile], cache_bytes: int | str) -> None:
        self._files = [file for file in files if isinstance(file, StoredFile)]
        try:
            self._limit = cache_bytes if isinstance(cache_bytes, int) else parse_bytes(cache_bytes)
        except ValueError as error:
            raise UserError(f"cache_bytes={cache_bytes!r} {error}", '"50GiB"', "data") from None

    def bring(self) -> None:
        """Have copies of the first objects that fit; the others are read range by range.

        That is done before data workers are forked, which can't reach a store.
        """
        for file in first_that_fit(self._files, self._limit):
            bring(file, self._limit)

    def brought(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        return BroughtShards(shards, self._limit)

    def fingerprint(self, digest: str) -> str:
        """A digest of the content, with names, sizes and tags of the objects."""
        known = [(file.name, file.size, file.etag) for file in self._files]
        return hashlib.sha256(json.dumps([digest, known]).encode()).hexdigest()

    @contextmanager
    def naming_objects(self) -> Iterator[None]:
        """Have errors of the block name the objects rather than their copies."""
        try:
            yield
        except SamecurveError as error:
            for file in self._files:
                path, url = str(file.path), str(file.url)
                error.cause = error.cause.replace(path, url)
                error.remedy = error.remedy.replace(path, url)
                error.where = error.where.replace(path, url)
            raise
