"""Stores that answer wrongly or not at all: a start ends, in a bounded time, with a message."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from s3_server import KEYS
from samecurve.errors import SamecurveError, UserError
from samecurve.run.remote.lease import Holder, claim
from samecurve.storage import listing
from samecurve.storage import place as places
from samecurve.storage.failures import StorageError
from samecurve.storage.object_cache import Listing
from samecurve.storage.place import Place, open_place
from samecurve.storage.url import ObjectUrl

URL = ObjectUrl("bucket", "run")
RETRIES = 1.0  # seconds, in place of 20


class _Answers(BaseHTTPRequestHandler):
    """Answers each request with what the server's function gives for its number."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        self.server.count += 1
        status, body = self.server.answer(self.server.count)
        if not status:  # the connection is dropped
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    answer: Callable[[int], tuple[int, bytes]]
    count = 0


@contextmanager
def store(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], tuple[int, bytes]]
) -> Iterator[_Server]:
    """A store with these answers, that this process reaches."""
    with _Server(("127.0.0.1", 0), _Answers) as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()
        thread.join()


def page(*keys: str, token: str = "") -> tuple[int, bytes]:
    """A page of a listing. token: of the next page; '': it is the last one"""
    entries = "".join(
        f'<Contents><Key>{key}</Key><Size>1</Size><ETag>"a"</ETag>'
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    truncated = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    return 200, f"<ListBucketResult>{truncated}{more}{entries}</ListBucketResult>".encode()


# answers to the request of a number
ENDLESS: dict[str, Callable[[int], tuple[int, bytes]]] = {
    "the same page, one token": lambda _number: page("run/a", token="T"),
    "the same page, new tokens": lambda number: page("run/a", token=f"T{number}"),
    "empty pages, one token": lambda _number: page(token="T"),
    "empty pages, new tokens": lambda number: page(token=f"T{number}"),
    "an object a page": lambda number: page(f"run/{number:09}", token=f"T{number}"),
    "two pages in turn": lambda number: page(f"run/{number % 2}", token=f"T{number % 2}"),
    "an end with a page before": lambda number: page(*["run/a"][: number % 2], token="T"),
}


SAME_PAGES = {"the same page, one token", "the same page, new tokens", "empty pages, one token"}


@pytest.mark.parametrize(
    "form",  # those of pages that never change: as "two pages in turn" and "new tokens"
    [pytest.param(form, marks=[pytest.mark.long] * (form in SAME_PAGES)) for form in ENDLESS],
)
def test_a_listing_without_an_end_ends(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(listing, "_MOST_OBJECTS", 120)
    monkeypatch.setattr(listing, "_QUIET", 0.4)
    monkeypatch.setattr(places, "_SILENT", 60.0)
    with store(monkeypatch, ENDLESS[form]) as server:
        place = Place(URL)
        began = time.monotonic()
        with pytest.raises(StorageError, match="does not end") as raised:
            place.list()
        assert time.monotonic() - began < 10
        assert "s3://bucket/run" in raised.value.cause
        assert "log" in raised.value.remedy
        assert not raised.value.again  # the same would happen
        asked = server.count
        time.sleep(0.1)
        assert server.count <= asked + 1  # nothing goes on asking
        if "empty" in form:
            with pytest.raises(SamecurveError, match="does not end"):
                open_place(URL, "--save-dir")
        with pytest.raises(SamecurveError, match="does not end"):
            Listing("data").find("s3://bucket/run/*.jsonl")


def test_a_listing_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MOST_SECONDS", 0.3)
    with (
        store(monkeypatch, ENDLESS["an object a page"]),
        pytest.raises(StorageError, match="objects in 0 s, and no end"),
    ):
        Place(URL).list()


def test_the_pages_of_a_listing_that_ends_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty page in between is no end."""
    pages = [page("run/a", "run/b", token="1"), page(token="2"), page("run/c")]
    with store(monkeypatch, lambda number: pages[number - 1]):
        assert list(Place(URL).list()) == ["a", "b", "c"]


FAILING: dict[str, Callable[[int], tuple[int, bytes]]] = {
    "503": lambda _number: (503, b"<Error><Code>SlowDown</Code></Error>"),
    "500": lambda _number: (500, b"<Error><Code>InternalError</Code></Error>"),
    "502": lambda _number: (502, b"bad gateway"),
    "504": lambda _number: (504, b""),
    "429": lambda _number: (429, b"<Error><Code>TooManyRequests</Code></Error>"),
    "a dropped connection": lambda _number: (0, b""),
}


@pytest.mark.parametrize(
    "form",  # other codes are made for as 503 is
    [
        pytest.param(form, marks=[pytest.mark.long] * (form not in {"503", "a dropped connection"}))
        for form in FAILING
    ],
)
def test_a_store_that_fails_at_a_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For as long as the page says, whatever the failure; then another start may help: exit 75."""
    assert places._RETRIES["retry_timeout"] == timedelta(seconds=20)
    monkeypatch.setitem(places._RETRIES, "retry_timeout", timedelta(seconds=RETRIES))
    monkeypatch.setitem(places._RETRIES, "backoff", {"init_backoff": timedelta(milliseconds=20)})
    monkeypatch.setitem(places._RETRIES["backoff"], "max_backoff", timedelta(milliseconds=40))
    monkeypatch.setattr(places, "_SILENT", 0.2)
    with store(monkeypatch, FAILING[form]) as server:
        began = time.monotonic()
        with pytest.raises(StorageError) as raised:
            open_place(URL, "--save-dir")
        assert time.monotonic() - began > 0.8 * RETRIES
        assert server.count > 7
    assert (raised.value.again, raised.value.exit_code) == (True, 75)
    assert raised.value.remedy
    assert "s3://bucket/run does not answer as it should" in capsys.readouterr().err


def test_a_store_that_recovers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight failures were more than the library had tried."""
    monkeypatch.setitem(places._RETRIES, "backoff", {"init_backoff": timedelta(milliseconds=20)})
    monkeypatch.setitem(places._RETRIES["backoff"], "max_backoff", timedelta(milliseconds=40))
    failing = FAILING["503"]
    with store(monkeypatch, lambda number: failing(number) if number < 9 else page()):
        open_place(URL, "--save-dir")


class _ChangingTags:
    """A place whose tags change without a write, so that each conditional write is refused.

    content: of the lease. found: whether it is there
    """

    url = URL

    def __init__(self, content: bytes, *, found: bool) -> None:
        self._content, self._found = content, found
        self.reads = self.writes = 0

    def read_tagged(self, _name: str) -> tuple[bytes, str]:
        self.reads += 1
        if not self._found:
            raise self._error("missing")
        return self._content, f"tag {self.reads}"

    def write(self, *_: object, **__: object) -> str:
        self.writes += 1
        raise self._error("conflict")

    def _error(self, kind: str) -> StorageError:
        error = StorageError(kind, "none")
        error.kind = kind  # type: ignore[assignment]
        return error


LEASES = {
    "no lease": (b"", False),
    "not JSON": (b"no lease", True),
    "of a run that ended": (b'{"copy": "a"}', True),
}


@pytest.mark.parametrize("form", LEASES)
def test_tags_that_change_end_a_start(form: str) -> None:
    """Each conditional write comes too late, and nobody else writes."""
    content, found = LEASES[form]
    place = _ChangingTags(content, found=found)
    with pytest.raises(UserError, match="could not be written in 4 tries") as raised:
        claim(place, "copy", "--save-dir")  # type: ignore[arg-type]
    assert "ETag" in raised.value.remedy
    assert place.writes == 4


def test_tags_of_a_released_lease_that_change_end_a_start() -> None:
    ended = Holder(copy="a", token="b", host="c", boot="d", pid=2, began=0.0, held=False)
    place = _ChangingTags(ended.content(), found=True)
    with pytest.raises(UserError, match="could not be written"):
        claim(place, "copy", "--save-dir")  # type: ignore[arg-type]
