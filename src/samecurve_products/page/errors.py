"""Errors as the page gets them: a status, and for each error a cause, a remedy and a place."""

from typing import TYPE_CHECKING, NotRequired, TypedDict

from samecurve.seam import InvalidConfigError, SamecurveError, UserError, printable
from samecurve_products.report.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ErrorEntry(TypedDict):
    cause: str
    remedy: str
    where: str
    key: NotRequired[str]  # the key of the config that the error is about


class RefusedError(Exception):
    """A request that is not served, with the status of the answer."""

    def __init__(self, status: int, cause: str, remedy: str = "", where: str = "") -> None:
        super().__init__(cause)
        self.status = status
        self.entry = entry(cause, remedy, where)


def entry(cause: str, remedy: str = "", where: str = "") -> ErrorEntry:
    cause, remedy, where = (redact(printable(text)) for text in (cause, remedy, where))
    return {"cause": cause, "remedy": remedy, "where": where}


def shown_error(error: "Mapping[str, str]") -> ErrorEntry:
    """An error of the plan worker, its secrets hidden."""
    shown = entry(error.get("cause", ""), error.get("remedy", ""), error.get("where", ""))
    if error.get("key"):
        shown["key"] = error["key"]
    return shown


def entries(error: SamecurveError) -> list[ErrorEntry]:
    """The errors that an exception stands for: a config may have several."""
    every: Sequence[SamecurveError] = [error]
    if isinstance(error, InvalidConfigError):
        every = error.errors
    return [entry(one.cause, one.remedy, one.where) for one in every]


def status_of(error: SamecurveError) -> int:
    """400: the request must change. 409: what it is about can't go on as it is."""
    return 400 if isinstance(error, UserError) else 409
