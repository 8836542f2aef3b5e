"""Places in a store: objects whole or not at all, writes on a condition, and failures that are
named with a remedy and without a secret.
"""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from s3_server import BUCKET, KEYS, S3, proxy, reach
from samecurve.core.system.installation import install_command
from samecurve.errors import SamecurveError
from samecurve.run.remote.lease import claim
from samecurve.storage import place as places
from samecurve.storage.failures import StorageError
from samecurve.storage.place import Place, open_place
from samecurve.storage.url import ObjectUrl, parse_url


@pytest.fixture
def place(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Place:
    reach(s3, monkeypatch)
    return s3.place("a run/x")


def said(call: Callable[[], object]) -> str:
    with pytest.raises(SamecurveError) as caught:
        call()
    text = str(caught.value)
    assert "remedy: " in text
    assert not any(secret in text for secret in KEYS.values())
    return text


def test_objects_are_listed_read_and_removed(place: Place, tmp_path: Path) -> None:
    content = os.urandom(17 << 20)  # several parts, and two ranges of a download
    (tmp_path / "large").write_bytes(content)
    place.upload("deep/a large one.bin", tmp_path / "large")
    place.write("small", b"abc")
    (tmp_path / "nothing").write_bytes(b"")
    place.upload("empty", tmp_path / "nothing")
    listed = place.list()
    sizes = {name: stored.size for name, stored in listed.items()}
    assert sizes == {"deep/a large one.bin": len(content), "small": 3, "empty": 0}
    place.download("deep/a large one.bin", len(content), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    etag = listed["deep/a large one.bin"].etag
    assert place.read_range("deep/a large one.bin", 5, 9, etag=etag) == content[5:14]
    place.write("deep/a large one.bin", b"another")
    with pytest.raises(StorageError) as caught:
        place.read_range("deep/a large one.bin", 0, 2, etag=etag)
    assert caught.value.kind == "conflict"
    place.remove(["small", "small", "never there"])
    assert set(place.list()) == {"deep/a large one.bin", "empty"}
    assert set(place.list("deep/")) == {"deep/a large one.bin"}


def test_a_write_on_a_condition(place: Place) -> None:
    tag = place.write("one", b"1", replacing="")
    second = place.write("one", b"2", replacing=tag)
    for wrong in ("", tag):
        with pytest.raises(StorageError) as caught:
            place.write("one", b"3", replacing=wrong)
        assert caught.value.kind == "conflict"
    assert place.read_tagged("one") == (b"2", second)


def test_one_of_two_starts_gets_the_lease(place: Place) -> None:
    """The other one is refused; a released lease can be claimed again."""
    won, lost = [], []

    def start() -> None:
        try:
            won.append(claim(place, "copy", "--save-dir"))
        except SamecurveError as error:
            lost.append(str(error))

    starts = [threading.Thread(target=start) for _ in range(4)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 3
    assert all("belongs to a live run: process" in text for text in lost)
    won[0].release()
    again = claim(place, "another", "--save-dir")
    assert again.before is not None
    assert again.before.copy == "copy"
    again.release(forget=True)
    assert "lease.json" not in place.list()


def test_failures_are_named(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(places._RETRIES, "retry_timeout", timedelta(seconds=0.5))
    reach(s3, monkeypatch)
    url = ObjectUrl("no-such-bucket", "x")
    text = said(lambda: open_place(url, "--save-dir"))
    assert "there is no bucket no-such-bucket at 127.0.0.1" in text
    assert "aws s3 mb s3://no-such-bucket" in text

    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    reach(s3, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{free}")
    assert "can't be reached" in said(lambda: open_place(ObjectUrl(BUCKET, ""), "--save-dir"))

    reach(s3, monkeypatch, AWS_ENDPOINT_URL="http://store.example:9000")
    text = said(lambda: open_place(ObjectUrl(BUCKET, ""), "--save-dir"))
    assert "store.example is reached through http" in text
    assert "AWS_ALLOW_HTTP=true" in text

    reach(s3, monkeypatch, AWS_METADATA_ENDPOINT=f"http://127.0.0.1:{free}")
    for name in KEYS:
        monkeypatch.delenv(name)
    text = said(lambda: open_place(ObjectUrl(BUCKET, ""), "--save-dir"))
    assert "knows no valid credentials" in text
    assert "AWS_ACCESS_KEY_ID" in text


ANSWERS = {
    403: ("AccessDenied", "forbids it (403 AccessDenied)"),
    400: ("ExpiredToken", "knows no valid credentials of yours (400 ExpiredToken)"),
    301: ("PermanentRedirect", "the bucket bucket is in another region"),
}


@pytest.mark.parametrize("status", ANSWERS)
def test_refusals_of_a_store(status: int, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store repeats the access key in its answer, as Amazon's does; nobody is shown it."""
    code, shown = ANSWERS[status]
    body = (
        f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEYS['AWS_ACCESS_KEY_ID']}</AWSAccessKeyId>"
        "</Error>"
    ).encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.recv(65536)
                client.sendall(head.encode() + body)
                client.close()

        threading.Thread(target=answer, daemon=True).start()
        port = listener.getsockname()[1]
        reach(s3, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        assert shown in said(lambda: open_place(ObjectUrl(BUCKET, ""), "--save-dir"))


def test_a_connection_that_breaks_is_tried_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy(s3.port) as line:
        reach(s3, monkeypatch, AWS_ENDPOINT_URL=f"http://127.0.0.1:{line.port}")
        place = s3.place("broken")
        line.mode = "drop"
        threading.Timer(0.5, lambda: setattr(line, "mode", "open")).start()
        place.write("one", b"1")
        assert place.read("one") == b"1"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samecurve.storage.place.find_spec", lambda _: None)
    text = said(lambda: open_place(ObjectUrl(BUCKET, ""), "--save-dir"))
    assert "--save-dir: s3:// needs obstore: not installed" in text
    assert install_command("s3") in text


@pytest.mark.parametrize("text", ["gs://b/x", "s3:///x", "s3://b/../x", "https://b/x"])
def test_addresses_that_are_refused(text: str) -> None:
    assert "s3://BUCKET/NAME" in said(lambda: parse_url(text, "--save-dir"))
