"""The guard before every route: who asks, from which page, and how much they send.

It is plain ASGI around the whole application, so no route can be forgotten, and answers are passed
on as they come. Nothing is served without the session's cookie but the page that says what to do.
"""

from collections.abc import Mapping

from samecurve_products.page.asgi import App, Message, Receive, Scope, Send, answer_error
from samecurve_products.page.errors import ErrorEntry, entry
from samecurve_products.page.hosts import host_name
from samecurve_products.page.session import Session
from samecurve_products.page.welcome import NO_SESSION, welcome

MOST_BODY = 1 << 20  # bytes of a request
_READING, _WRITING = frozenset({"GET", "HEAD"}), frozenset({"POST", "DELETE"})
_OWN_SITE = {"", "same-origin", "none"}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class _TooLargeError(Exception):
    pass


class _GoneError(Exception):
    """The browser has closed the connection before the request was whole."""


class Guard:
    """Lets requests of the session through to the application.

    names: of this machine, as a Host header may have them
    """

    def __init__(self, app: App, session: Session, names: frozenset[str]) -> None:
        self._app, self._session, self._names = app, session, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        headers = _headers(scope)
        refusal = self._refusal(scope, headers)
        if refusal:
            await answer_error(send, *refusal)
            return
        has_session = self._session.is_open_to(headers.get("cookie", ""))
        is_front = scope["path"] == "/" and scope["method"] in _READING
        if is_front and (scope["query_string"] or not has_session):
            await welcome(self._session, scope, headers, send)
            return
        if not has_session:
            await answer_error(send, 401, entry(*NO_SESSION))
            return
        try:
            body = await _whole_body(headers, receive) if scope["method"] in _WRITING else b""
        except _TooLargeError:
            cause = f"the request has more than {MOST_BODY} bytes"
            await answer_error(send, 413, entry(cause, "send less at once"))
            return
        except _GoneError:
            return
        await self._app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, ErrorEntry] | None:
        """Why a request is refused whoever sends it; None: it is not."""
        host, method = headers.get("host", ""), scope["method"]
        if host_name(host) not in self._names:
            return 403, entry(
                f"this server does not answer as {host[:100]!r}",
                "open the address that samecurve ui has printed",
            )
        if "origin" in headers and headers["origin"] != f"{scope['scheme']}://{host}":
            return 403, entry("the request comes from a page of another address")
        site = headers.get("sec-fetch-site", "")
        if site not in _OWN_SITE and not (scope["path"] == "/" and method in _READING):
            return 403, entry("the request comes from a page of another site")
        if method in _READING:
            return None
        if method not in _WRITING:
            return 405, entry(f"{method[:20]} is not served here")
        if headers.get("x-samecurve") != "1":
            return 403, entry("a request that changes something needs the header X-Samecurve: 1")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, entry(
                "a request that changes something needs a body in JSON",
                "send the header Content-Type: application/json",
            )
        return None


def _headers(scope: Scope) -> dict[str, str]:
    """Names in lower case. A header that comes twice where one is expected has no valid value."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "cookie" and key in headers:
            headers[key] += f"; {text}"
        elif key in headers and key in {"host", "origin", "content-length", "x-samecurve"}:
            headers[key] = "\0"
        else:
            headers[key] = text
    return headers


def _with_headers(send: Send) -> Send:
    """A send() that adds the security headers to the answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message.get("headers", ())}
            added = [
                (name.encode(), value.encode())
                for name, value in _HEADERS.items()
                if name.encode() not in own
            ]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending


async def _whole_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The body of a request, however it is cut. _TooLargeError: it is larger than MOST_BODY.

    _GoneError: the rest will not come.
    """
    announced = headers.get("content-length", "0")
    if announced.isdigit() and (len(announced) > 12 or int(announced) > MOST_BODY):
        raise _TooLargeError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        body += message.get("body", b"")
        if len(body) > MOST_BODY:
            raise _TooLargeError
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive() that gives the body once, and then what comes after it."""
    sent = False

    async def receiving() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving
