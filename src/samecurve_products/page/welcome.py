"""The front door: exchanges the token of the URL for the cookie, or says what to do.

A reload, a bookmark or a browser's look ahead never uses the token up by accident: only a whole GET
of the person's own does.
"""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from urllib.parse import parse_qs

from samecurve_products.page.asgi import Scope, Send, answer_bytes
from samecurve_products.page.session import Session

NO_SESSION = (
    "this browser has no session with this server",
    "open the address that samecurve ui has printed; if it was used already, use"
    " the browser that has opened it, or start samecurve ui again",
)
_USED = (
    "the token was used",
    "open the tab that has the session, or restart samecurve ui: it prints a new address",
)
_WRONG = (
    "this is not the token of the server that answers here",
    "open the address that samecurve ui has printed last: each start has a new token",
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 34rem; margin: 18vh auto 0; padding: 0 1rem; }
h1 { font-size: 1.25rem; font-weight: 600; }
"""
_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_CSP = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_ON = '<meta http-equiv="refresh" content="0; url=/">'


async def welcome(session: Session, scope: Scope, headers: Mapping[str, str], send: Send) -> None:
    """Answer a request for `/` that has a token, or no cookie."""
    has_session = session.is_open_to(headers.get("cookie", ""))
    query = parse_qs(scope["query_string"].decode("latin-1"))
    token = query.get("token", [""])[-1]
    if has_session:
        await _go_on(send, headers)
        return
    is_look_ahead = "prefetch" in headers.get("sec-purpose", headers.get("purpose", ""))
    if not token or is_look_ahead or scope["method"] != "GET":
        await _refuse(send, *NO_SESSION)
        return
    match session.exchange(token):
        case "given":
            await _go_on(send, headers, {"set-cookie": session.set_cookie()})
        case "used":
            await _refuse(send, *_USED)
        case "wrong":
            await _refuse(send, *_WRONG)


async def _go_on(
    send: Send, headers: Mapping[str, str], added: Mapping[str, str] | None = None
) -> None:
    """Lead to the page without a token in its address.

    A redirect of a navigation that another site began would go without the cookie, since that is
    SameSite=Strict; a page of our own that leads on does not.
    """
    if headers.get("sec-fetch-site", "none") in {"none", "same-origin"}:
        await answer_bytes(send, 303, b"", "text/plain", {"location": "/", **(added or {})})
        return
    page = _page("Samecurve", "Samecurve opens ...", head=_ON)
    await answer_bytes(send, 200, page, _MEDIA, {"content-security-policy": _CSP, **(added or {})})


_MEDIA = "text/html; charset=utf-8"


async def _refuse(send: Send, cause: str, remedy: str) -> None:
    page = _page(f"{cause[:1].upper()}{cause[1:]}", f"{remedy[:1].upper()}{remedy[1:]}.")
    await answer_bytes(send, 401, page, _MEDIA, {"content-security-policy": _CSP})


def _page(title: str, text: str, head: str = "") -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"{head}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(text)}</p></main></body></html>"
    ).encode()
