"""The address of a place in an object store: s3://bucket/prefix."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from samecurve.errors import UserError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


@dataclass(frozen=True)
class ObjectUrl:
    """A bucket and what the names of the objects begin with, without a slash at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def __truediv__(self, name: str) -> "ObjectUrl":
        return ObjectUrl(self.bucket, f"{self.prefix}/{name}".strip("/"))

    @property
    def short_name(self) -> str:
        """A name for a local directory, which no other URL has."""
        last = re.sub(r"[^A-Za-z0-9._-]", "-", (self.prefix or self.bucket).rpartition("/")[2])
        return f"s3-{last}-{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"


def run_home(url: ObjectUrl) -> Path:
    """The directory of this machine in which the run at an address trains."""
    return Path("runs") / url.short_name


def is_url(text: object) -> bool:
    """Whether a text names a place that is no path of this machine."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def parse_url(text: str, where: str) -> ObjectUrl:
    """The place that a URL names. where: the flag or key that has the URL

    UserError: it names no bucket, another kind of store, or has an empty or dotted part.
    """
    scheme, _, rest = text.partition("://")
    if scheme.lower() != "s3":
        raise UserError(
            f"{text}: of all stores this version reaches those that speak S3",
            "s3://BUCKET/NAME (other stores have S3 gateways: AWS_ENDPOINT_URL names one); or a"
            " path of this machine",
            where,
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if not _BUCKET.fullmatch(bucket) or any(part in {"", ".", ".."} for part in parts):
        raise UserError(f"{text} is no address of objects", "s3://BUCKET/NAME", where)
    return ObjectUrl(bucket, prefix)
