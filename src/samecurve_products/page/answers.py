"""Bodies of requests and of answers: JSON, with numbers that JSON has."""

import json
from typing import Any

from fastapi import Request
from starlette.responses import Response

from samecurve.observe import finite
from samecurve_products.page.errors import RefusedError


def json_answer(value: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(json_text(value), status_code=status, media_type="application/json")


def json_text(value: object) -> str:
    """The value as JSON. nan and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


async def json_body(request: Request) -> dict[str, Any]:
    """The body of a request that changes something: a JSON object.

    RefusedError: it is none. An empty body is an empty object.
    """
    body = await request.body()
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RefusedError(400, "the request's JSON is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise RefusedError(400, f"the request is no JSON: {error}", where="body") from None
    if not isinstance(value, dict):
        raise RefusedError(400, "the request's JSON is no object", 'such as {"name": "value"}')
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def text_of(body: dict[str, Any], name: str, most: int = 1000) -> str | None:
    """A text in a request's body. None: it is not there. RefusedError: it is no text."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > most:
        raise RefusedError(400, f"{name} must be a text of at most {most} characters", where=name)
    return value
