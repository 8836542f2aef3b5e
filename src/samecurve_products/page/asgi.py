"""Answers in plain ASGI, for what is answered before the application is asked."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from samecurve_products.page.errors import ErrorEntry

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def answer_error(send: Send, status: int, *errors: ErrorEntry) -> None:
    await answer_bytes(send, status, json.dumps({"errors": errors}).encode(), "application/json")


async def answer_bytes(
    send: Send, status: int, body: bytes, media: str, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer."""
    all_headers = {"content-type": media, "content-length": str(len(body)), **(headers or {})}
    if status == 413:  # the rest of the body is not read
        all_headers["connection"] = "close"
    encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
