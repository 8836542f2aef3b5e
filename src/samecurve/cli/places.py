"""Paths of a command line that may be addresses of places in a store (s3://BUCKET/NAME)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.errors import UserError

if TYPE_CHECKING:  # few commands name a store
    from samecurve.run.remote.local_copy import Want
    from samecurve.storage.url import ObjectUrl


def at_hand(place: "Path | ObjectUrl", want: "Want", where: str = "RUN") -> Path:
    """The path of a run; one in a store is copied into the cache. want, where: as local_copy()"""
    if isinstance(place, Path):
        return place
    from samecurve.run.remote.local_copy import local_copy

    return local_copy(place, want, where)


def refuse_urls(command: click.Command, values: Mapping[str, Any]) -> None:
    """UserError: a path is the address of a place in a store, which this verb does not reach."""
    for parameter in command.params:
        value = values.get(parameter.name or "")
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) and path.parts[:1] == ("s3:",):
                url = str(path).replace(":/", "://", 1)
                raise UserError(
                    f"{url}: `{command.name}` takes a path of this machine here",
                    f"`aws s3 sync {url} DIR` copies it; train, eval, sample, export, report and"
                    " compare-runs take the address of a run itself",
                    parameter.opts[0],
                )
