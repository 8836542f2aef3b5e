"""Who is served by the web page's server: the session's browser, on pages of the server alone."""

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from serving import Served, make_run, planned, serving, step

from samecurve.errors import UserError
from samecurve_products.page.guard import CSP, MOST_BODY
from samecurve_products.page.hosts import check_host, host_name, own_names
from samecurve_products.page.session import Session
from samecurve_products.report.redact import HIDDEN, redact, redact_blocks

ROUTES = ("/api/state", "/api/runs", "/api/machine", "/static/index.html", "/page/page.css", "/no")
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("root")
    (root / "secret.txt").write_text("outside of every run")
    home = make_run(root / "runs" / "first", planned(), step(1))
    (home / "logs").mkdir()
    (home / "logs" / "rank-0.log").write_text("line\n")
    with serving(root) as server:
        yield server


def test_nothing_is_served_without_the_cookie(served: Served) -> None:
    for path in ROUTES:
        answer = served.ask(path, cookie=False)
        assert answer.status == 401
        assert "no session" in answer.cause
    front = served.ask("/", cookie=False)
    assert front.status == 401
    assert b"samecurve ui" in front.body


@pytest.mark.parametrize("cookie", ["samecurve-{port}=wrong", "other=1", "samecurve-{port}=", "="])
def test_a_wrong_cookie_is_refused(served: Served, cookie: str) -> None:
    headers = {"Cookie": cookie.format(port=served.port)}
    assert served.ask("/api/runs", headers=headers).status == 401


# cookies that other programs at 127.0.0.1 set; {own} is the name of the page's own cookie
COOKIES = {
    "JSON": '{{"theme": "dark", "n": [1, 2]}}',
    "a value of JSON": 'settings={{"a":1,"b":"c"}}',
    "quotes": 'a="b c"',
    "an open quote": 'a="b',
    "a quote around a semicolon": 'a="b; c"',
    "two semicolons": "a=1;;b=2",
    "semicolons alone": ";;;",
    "UTF-8": "name=\u00c3\u00a9\u00e2\u0082\u00ac",
    "Latin-1": "n\u00e4me=\u00fc",
    "no value": "flag",
    "no name": "=1",
    "several equals signs": "a=b=c==",
    "brackets in a name": "a[b]@{{c}}:d/e=1",
    "a space in a name": "a b=1",
    "commas": "a=1, b=2",
    "a backslash": 'a="\\"',
    "a reserved word": "expires=1; path=/; secure; httponly",
    "the same name": "{own}=wrong",
    "the same name without a value": "{own}",
    "the own name in quotes": 'a="{own}=wrong',
}


@pytest.mark.parametrize("place", ["before", "after", "in a header of its own"])
@pytest.mark.parametrize("other", COOKIES)
def test_cookies_of_other_programs_lock_nobody_out(
    served: Served, other: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's cookie is found, the token serves, and such a cookie alone opens nothing."""
    own, _, _ = served.cookie.partition("=")
    cookie = COOKIES[other].format(own=own)
    assert served.ask("/api/runs", headers={"Cookie": cookie}).status == 401
    both = {"before": f"{cookie}; {served.cookie}", "after": f"{served.cookie}; {cookie}"}
    headers = {"Cookie": both.get(place, served.cookie)}
    if place not in both:
        headers["cookie"] = cookie
    assert served.ask("/api/runs", headers=headers).status == 200
    monkeypatch.setattr(served.session, "_used", False)
    entered = served.ask(f"/?token={served.session.token}", headers={"Cookie": cookie})
    assert entered.status == 303
    assert entered.headers["set-cookie"].startswith(served.cookie)


def test_the_token_serves_once(served: Served) -> None:
    used = served.ask(f"/?token={served.session.token}", cookie=False)
    assert used.status == 401
    assert b"token was used" in used.body
    assert "set-cookie" not in used.headers
    wrong = served.ask("/?token=wrong", cookie=False)
    assert wrong.status == 401
    assert "set-cookie" not in wrong.headers


def test_the_session_opens_the_used_address_again(served: Served) -> None:
    answer = served.ask(f"/?token={served.session.token}")
    assert (answer.status, answer.headers["location"]) == (303, "/")


def test_a_server_knows_its_own_token_and_cookie_alone() -> None:
    session, other = Session(8631), Session(8631)
    assert len(session.token) >= 43  # 256 bits
    assert [session.exchange(token) for token in ("é", other.token)] == ["wrong", "wrong"]
    assert [session.exchange(session.token) for _ in range(2)] == ["given", "used"]
    cookie, *flags = session.set_cookie().split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(flags)
    assert session.is_open_to(f"a=1; {cookie}")
    assert not other.is_open_to(cookie)


def test_a_look_ahead_does_not_use_the_token_up(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.session._used = False
        path = f"/?token={server.session.token}"
        ahead = server.ask(path, headers={"Sec-Purpose": "prefetch;prerender"}, cookie=False)
        head = server.ask(path, "HEAD", cookie=False)
        assert (ahead.status, head.status) == (401, 401)
        other_site = server.ask(path, headers={"Sec-Fetch-Site": "cross-site"}, cookie=False)
        assert other_site.status == 200  # a redirect would go without the cookie
        assert b'http-equiv="refresh"' in other_site.body
        assert "set-cookie" in other_site.headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "127.0.0.1@evil"]
)
def test_a_foreign_host_is_refused(served: Served, host: str) -> None:
    answer = served.ask("/api/runs", headers={"Host": host.format(port=served.port)})
    assert answer.status in {400, 403}
    assert b'"runs"' not in answer.body


def test_names_of_this_machine_are_answered(served: Served) -> None:
    """Behind `ssh -L 9000:127.0.0.1:8631` the browser's port is another one."""
    for host in ("localhost:9000", "127.0.0.1:9000", "[::1]:9000", "LOCALHOST"):
        assert served.ask("/api/runs", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"]
)
def test_a_foreign_origin_is_refused(served: Served, origin: str) -> None:
    headers = {"Origin": origin.format(port=served.port), "X-Samecurve": "1"}
    headers["Content-Type"] = "application/json"
    run = f"/api/runs/{served.run_id('runs/first')}"
    assert served.ask("/api/runs", headers=headers).status == 403
    assert served.ask(f"{run}/kill", "POST", b"{}", headers).status == 403
    assert served.ask(run, "DELETE", b"{}", headers).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_is_refused(served: Served, site: str) -> None:
    for path in ROUTES:
        assert served.ask(path, headers={"Sec-Fetch-Site": site}).status == 403


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_writes_need_the_header_and_json(served: Served, method: str) -> None:
    path = f"/api/runs/{served.run_id('runs/first')}"
    path += "/stop" if method == "POST" else ""
    json_type = {"Content-Type": "application/json"}
    assert served.ask(path, method, b"{}", json_type).status == 403
    assert served.ask(path, method, b"{}", {**json_type, "X-Samecurve": "0"}).status == 403
    form = {"X-Samecurve": "1", "Content-Type": "application/x-www-form-urlencoded"}
    assert served.ask(path, method, b"a=1", form).status == 415
    assert served.ask(path, method, b"{}", {"X-Samecurve": "1"}).status == 415
    assert "runs/first" in served.rows()


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(served: Served, method: str) -> None:
    answer = served.ask("/api/runs", method)
    assert answer.status in {400, 405}
    assert "access-control-allow-origin" not in answer.headers


TRAVERSALS = (
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "%252e%252e%252fsecret.txt",
    "..\\secret.txt",
    "..%5csecret.txt",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "....//secret.txt",
    "..%c0%afsecret.txt",
    "secret.txt%00.png",
)


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_out(served: Served, path: str) -> None:
    run = served.run_id("runs/first")
    prefixes = ("/static/", "/page/", "/api/runs/", f"/api/runs/{run}/picture/", "/")
    places = [f"{prefix}{path}" for prefix in prefixes]
    places += [f"/api/runs/{path}/page", f"/api/runs/{run}/logs?file={quote(path)}"]
    places += [f"/api/runs/{run}/logs?file={path}", f"/api/compare?runs={path},{run}"]
    for place in places:
        answer = served.ask(place)
        assert answer.status in {400, 403, 404, 405, 422}, place
        assert b"outside of every run" not in answer.body
        assert b"root:" not in answer.body


def test_a_link_is_no_run_and_no_log(served: Served, tmp_path: Path) -> None:
    """Links are not followed: not to a run, not to a log, not to a picture."""
    root = served.site.catalogue.roots[0].path
    outside = make_run(tmp_path / "outside", planned())
    link, log = root / "runs" / "link", root / "runs" / "first" / "logs" / "rank-1.log"
    link.symlink_to(outside)
    log.symlink_to(root / "secret.txt")
    try:
        assert "runs/link" not in served.rows()
        logs = served.ask(f"/api/runs/{served.run_id('runs/first')}/logs").json
        assert logs["files"] == ["rank-0.log"]
    finally:
        link.unlink()
        log.unlink()


def test_a_large_body_is_refused(served: Served) -> None:
    headers = {"X-Samecurve": "1", "Content-Type": "application/json"}
    path = f"/api/runs/{served.run_id('runs/first')}/stop"
    announced = {**headers, "Content-Length": str(MOST_BODY + 1)}
    with closing(socket.create_connection(("127.0.0.1", served.port))) as connection:
        lines = [f"POST {path} HTTP/1.1", f"Host: {served.host}", f"Cookie: {served.cookie}"]
        lines += [f"{name}: {value}" for name, value in announced.items()]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())  # and no byte of the body
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_large_body_in_pieces_is_refused(served: Served) -> None:
    path = f"/api/runs/{served.run_id('runs/first')}/stop"
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)) as connection:
        headers = {"X-Samecurve": "1", "Content-Type": "application/json"}
        headers |= {"Cookie": served.cookie, "Host": served.host}
        pieces = (b" " * 65536 for _ in range(17))
        try:
            connection.request("POST", path, pieces, headers, encode_chunked=True)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server has closed the connection before the end
        assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'"text"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"devices": 7}'],
)
def test_a_malformed_body_is_refused(served: Served, body: bytes) -> None:
    headers = {"X-Samecurve": "1", "Content-Type": "application/json"}
    path = f"/api/runs/{served.run_id('runs/first')}/resume"
    answer = served.ask(path, "POST", body, headers)
    assert answer.status == 400
    assert answer.cause


@pytest.mark.parametrize(
    "devices", ["0; rm -rf /", "--set", "cpu:0", "0,,1", "$(id)", "../x", "0\n"]
)
def test_devices_of_a_resume_are_devices(served: Served, devices: str) -> None:
    path = f"/api/runs/{served.run_id('runs/first')}/resume"
    answer = served.write(path, {"devices": devices})
    assert answer.status == 400
    assert answer.json["errors"][0]["where"] == "devices"
    assert served.write(path, {"strategy": "--help"}).status == 400


def test_every_answer_has_the_security_headers(served: Served) -> None:
    run = served.run_id("runs/first")
    answers = [served.ask(path) for path in (*ROUTES, f"/api/runs/{run}/page")]
    answers += [served.ask(path, cookie=False) for path in ROUTES]
    answers += [served.ask("/api/runs", headers={"Origin": "http://evil.example"})]
    answers += [served.write(f"/api/runs/{run}/nothing")]
    for answer in answers:
        assert answer.headers["content-security-policy"] == CSP
    for answer in [*answers, served.ask("/", cookie=False), served.ask("/?token=x", cookie=False)]:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert "server" not in answer.headers
    assert served.ask("/api/runs").headers["cache-control"] == "no-store"


def test_routes_of_the_framework_are_off(served: Served) -> None:
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        assert served.ask(path).status == 404


def test_texts_of_a_run_are_data(served: Served) -> None:
    """Markup in a name or a log arrives as text in JSON, which no browser takes for a page."""
    root = served.site.catalogue.roots[0].path
    home = make_run(root / f"{EVIL.replace('/', '')}", planned())
    (home / "logs").mkdir()
    (home / "logs" / "rank-0.log").write_text(
        f"{EVIL}\x1b[31mred\x1b[0m \u202ecilbup HF_TOKEN=x1y2z3\n"
    )
    answer = served.ask("/api/runs")
    assert answer.headers["content-type"] == "application/json"
    logs = served.ask(f"/api/runs/{served.run_id(home.name)}/logs").json
    assert logs["lines"] == [f"{EVIL}red \\u202ecilbup HF_TOKEN={HIDDEN}"]
    assert served.ask(f"/api/runs/{served.run_id(home.name)}/page").status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu-box", "[::]"])
def test_other_hosts_need_the_flag(host: str) -> None:
    with pytest.raises(UserError, match="--host") as refused:
        check_host(host, allow_remote=False)
    assert "ssh -L" in refused.value.remedy
    check_host(host, allow_remote=True)


def test_the_command_refuses_to_listen_to_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "samecurve", "ui", str(tmp_path), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--allow-remote" in done.stderr
    assert "ssh -L" in done.stderr


def test_loopback_names() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.2"):
        check_host(host, allow_remote=False)
    assert host_name("[::1]:80") == "[::1]"
    assert host_name("a b") is None
    assert "evil.example" not in own_names("0.0.0.0", allow_remote=True)
    assert socket.gethostname().lower() in own_names("0.0.0.0", allow_remote=True)
    assert socket.gethostname().lower() not in own_names("127.0.0.1", allow_remote=False)


SECRETS = {
    "token=abc123def": f"token={HIDDEN}",
    "WANDB_API_KEY=0123456789abcdef": f"WANDB_API_KEY={HIDDEN}",
    '{"hf_token": "hf_abc", "lr": 1}': f'{{"hf_token": "{HIDDEN}", "lr": 1}}',
    "Authorization: Bearer abc.def-ghi": f"Authorization: {HIDDEN}",
    "api_key: sk-1, next": f"api_key: {HIDDEN}, next",
    "--hub-token s3cr3t --lr 1": f"--hub-token {HIDDEN} --lr 1",
    "password='hunter 2'": f"password='{HIDDEN}'",
    "https://me:pw@host/x?token=1a2b3c&y=2": f"https://{HIDDEN}@host/x?token={HIDDEN}&y=2",
    "got hf_abcdefghijkl from the hub": f"got {HIDDEN} from the hub",
    "ghp_0123456789abcdefghijklmn": HIDDEN,
    "AKIAABCDEFGHIJKLMNOP": HIDDEN,
    "x -----BEGIN RSA PRIVATE KEY-----\nMII\n": f"x {HIDDEN}",
}
PLAIN = (
    "tokens_per_second: 4096.5  tokens=200  max_tokens: 20000",
    "eos_token: </s>  pad_token='<pad>'  tokenizer: gpt2",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "hub_token: null",
    "http://127.0.0.1:8631/x 12:30:15 step: 12",
    "the token was used; secrets are hidden",
)


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_hidden(text: str) -> None:
    assert redact(text) == SECRETS[text]


@pytest.mark.parametrize("text", PLAIN)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def test_secrets_of_a_page_are_hidden() -> None:
    blocks = [
        {"type": "table", "rows": [["track.api_key", "abc"], ["data.hub_token", {"text": "abc"}]]},
        {"type": "pre", "text": "lr 1\nHF_TOKEN=abc"},
        {"type": "pictures", "items": [{"src": "data:image/png;base64,token=abc"}]},
        {"api_key": "abc", "eos_token": "</s>", "password": None},
    ]
    table, pre, pictures, keys = redact_blocks(blocks)
    assert table["rows"] == [["track.api_key", HIDDEN], ["data.hub_token", {"text": HIDDEN}]]
    assert pre["text"] == f"lr 1\nHF_TOKEN={HIDDEN}"
    assert pictures == blocks[2]
    assert keys == {"api_key": HIDDEN, "eos_token": "</s>", "password": None}


def test_hiding_takes_no_longer_than_the_text() -> None:
    """A long text without spaces is searched in one pass: many would not end in a test's time."""
    for part in ("a", "a_", "token", "x-", "-"):
        text = part * (400_000 // len(part))
        assert redact(text) == text


def test_json_is_what_browsers_read(served: Served) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    json.loads(served.ask("/api/runs").body, parse_constant=refuse)


def test_a_websocket_or_garbage_writes_nothing_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another program's page, left open, may try a websocket on this port every second."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    with serving(tmp_path) as served:
        assert served.ask("/api/kernels", headers={**upgrade, **key}).status in {403, 404}
        with closing(socket.create_connection(("127.0.0.1", served.port))) as garbage:
            garbage.sendall(b"\x16\x03\x01 no request\r\n\r\n")
            garbage.recv(1000)
    assert capfd.readouterr() == ("", "")
