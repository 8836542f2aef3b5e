"""Failures of an object store in the user's words.

A store's own text may repeat an access key or a whole request. So no part of it is shown but the
HTTP status and the store's code word.
"""

import re
from dataclasses import dataclass
from typing import Literal

from samecurve.errors import RunError, UserError

Kind = Literal[
    "missing",
    "conflict",
    "credentials",
    "forbidden",
    "bucket",
    "region",
    "plain-http",
    "unsupported",
    "unreachable",
    "slow",
    "busy",
    "other",
]
_CHANGE = {"credentials", "forbidden", "bucket", "region", "plain-http"}  # only the user can
_PASSING = {"unreachable", "slow", "busy"}  # another start may find the store at work
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_METADATA = re.compile(r"latest/(api/token|meta-data)|MissingCredentials|no credentials", re.I)


class StorageError(RunError):
    """A store that did not do what it was asked for. kind: why, for code that decides on it."""

    kind: Kind = "other"

    @property
    def needs_user(self) -> bool:
        """Whether trying again is of no use before the user has changed something."""
        return self.kind in _CHANGE

    def as_user_error(self, where: str) -> UserError | RunError:
        """The error at a start: a setting that is wrong is the user's input."""
        if not self.needs_user:
            return self
        return UserError(self.cause, self.remedy, where)


@dataclass(frozen=True)
class Attempted:
    """What was tried: `what` with the object or place `name`, at this endpoint, in this bucket."""

    what: str
    name: str
    bucket: str
    endpoint: str  # its host; '': Amazon's own


def explain(error: BaseException, attempted: Attempted) -> StorageError:
    """The error of a store that the library raised, in the user's words."""
    text = f"{type(error).__name__} {error}"
    status, code = _first(_STATUS, text), _first(_CODE, text)
    kind = _kind(type(error).__name__, text, status, code)
    at = attempted.endpoint or "Amazon S3"
    answer = " ".join(filter(None, [status, code])) or "no answer"
    cause, remedy = _words(kind, attempted, at, answer)
    explained = StorageError(
        f"{attempted.what} {attempted.name}: {cause}", remedy, again=kind in _PASSING
    )
    explained.kind = kind
    return explained


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _kind(name: str, text: str, status: str, code: str) -> Kind:
    by_code: dict[str, Kind] = {
        "NoSuchBucket": "bucket",
        "NoSuchKey": "missing",
        "PreconditionFailed": "conflict",
        "ConditionalRequestConflict": "conflict",
        "PermanentRedirect": "region",
        "AuthorizationHeaderMalformed": "region",
        "InvalidAccessKeyId": "credentials",
        "SignatureDoesNotMatch": "credentials",
        "ExpiredToken": "credentials",
        "InvalidToken": "credentials",
        "NotImplemented": "unsupported",
        "AccessDenied": "forbidden",
    }
    by_name: dict[str, Kind] = {
        "FileNotFoundError": "missing",
        "NotFoundError": "missing",
        "AlreadyExistsError": "conflict",
        "PreconditionError": "conflict",
        "NotSupportedError": "unsupported",
        "NotImplementedError": "unsupported",
        "PermissionDeniedError": "forbidden",
        "UnauthenticatedError": "credentials",
    }
    by_status: dict[str, Kind] = {
        "301": "region",
        "401": "credentials",
        "403": "forbidden",
        "404": "missing",
        "409": "conflict",
        "412": "conflict",
        "429": "busy",
        "501": "unsupported",
    }
    if _METADATA.search(text):
        return "credentials"
    if "redirect without LOCATION" in text:
        return "region"
    if code in by_code:
        return by_code[code]
    if name in by_name:
        return by_name[name]
    if status in by_status:
        return by_status[status]
    if status.startswith("5"):
        return "busy"
    return _connection_kind(text)


def _connection_kind(text: str) -> Kind:
    if "builder error" in text or "URL scheme is not allowed" in text:
        return "plain-http"
    if re.search(r"kind: Timeout|timed out|TimedOut|operation timed", text):
        return "slow"
    if re.search(r"kind: (Connect|Request|Interrupted|Decode)|error sending request", text):
        return "unreachable"
    return "other"


def _words(kind: Kind, attempted: Attempted, at: str, answer: str) -> tuple[str, str]:
    """Cause and remedy."""
    bucket = attempted.bucket
    keys = (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) in the environment;"
        ' for a profile: eval "$(aws configure export-credentials --format env)"; on a machine'
        " with a role nothing is needed"
    )
    words: dict[Kind, tuple[str, str]] = {
        "missing": ("there is no such object", "a name that `aws s3 ls` of the place shows"),
        "conflict": (
            "another program has written it meanwhile",
            "one run at a time at one place",
        ),
        "credentials": (f"{at} knows no valid credentials of yours ({answer})", keys),
        "forbidden": (
            f"{at} forbids it ({answer})",
            f"the rights s3:ListBucket on {bucket} and s3:GetObject, s3:PutObject, s3:DeleteObject"
            " on its objects; or other credentials",
        ),
        "bucket": (
            f"there is no bucket {bucket} at {at}",
            f"aws s3 mb s3://{bucket}; or AWS_ENDPOINT_URL and AWS_REGION of the store that has it",
        ),
        "region": (
            f"the bucket {bucket} is in another region ({answer})",
            "AWS_REGION=... of the bucket",
        ),
        "plain-http": (
            f"{at} is reached through http, which hides nothing",
            "AWS_ENDPOINT_URL=https://...; or AWS_ALLOW_HTTP=true where the network is yours",
        ),
        "unsupported": (f"{at} can't do that ({answer})", "a store that knows conditional writes"),
        "unreachable": (
            f"{at} can't be reached, or dropped the connection",
            "see that it runs and that AWS_ENDPOINT_URL, AWS_REGION and the network are right",
        ),
        "slow": (f"{at} did not answer in time", "see whether the store or the network is busy"),
        "busy": (
            f"{at} can't serve requests just now ({answer})",
            "wait until the store works again (its own log, or its status page), and run the same"
            " command",
        ),
        "other": (
            f"{at} failed ({answer})",
            "see the store's own log, and run the same command again",
        ),
    }
    return words[kind]
