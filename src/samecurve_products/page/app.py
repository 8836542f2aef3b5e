"""The application behind the guard: every route, and how each failure is answered."""

import logging
import platform
import traceback
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from samecurve import __version__
from samecurve.seam import SamecurveError, printable
from samecurve_products.page import compare, run_routes
from samecurve_products.page.answers import json_answer
from samecurve_products.page.errors import RefusedError, entries, entry, shown_error, status_of
from samecurve_products.page.form.plan_worker import PlanRefusedError
from samecurve_products.page.form_routes import form_routes
from samecurve_products.page.site import Site
from samecurve_products.page.static_files import own_file, shared_file
from samecurve_products.report.redact import redact


def make_app(site: Site) -> FastAPI:
    """The application, without the guard."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    explained: tuple[type[Exception], ...] = (RefusedError, PlanRefusedError, SamecurveError)
    for kind in (*explained, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)

    @app.get("/")
    def front(request: Request) -> Response:
        return own_file(request, "index.html")

    @app.get("/static/{name:path}")
    def static(request: Request, name: str) -> Response:
        return own_file(request, name)

    @app.get("/page/{name:path}")
    def page(request: Request, name: str) -> Response:
        return shared_file(request, name)

    @app.get("/api/state")
    def state() -> Response:
        devices = site.devices
        return json_answer(
            {
                "version": __version__,
                "host": platform.node(),
                "roots": [
                    {"id": root.id, "name": printable(root.name), "path": printable(str(root.path))}
                    for root in site.catalogue.roots
                ],
                "devices": devices.now(),
                "detected": devices.detected,
                "cores": devices.machine.cores,
                "cpu": devices.machine.cpu,
            }
        )

    run_routes.add(app, site)
    compare.add(app, site)
    app.include_router(form_routes(site.desk))
    return app


def _answer_error(request: Request, error: Exception) -> Response:
    """The answer in place of one that has failed.

    The traceback of a fault of ours goes to the server's log, not to the browser.
    """
    match error:
        case RefusedError():
            return json_answer({"errors": [error.entry]}, error.status)
        case PlanRefusedError():
            return json_answer({"errors": list(map(shown_error, error.errors))}, 400)
        case SamecurveError():
            return json_answer({"errors": entries(error)}, status_of(error))
        case HTTPException():
            phrase = HTTPStatus(error.status_code).phrase
            cause = f"{request.method} {request.url.path[:100]}: {phrase}"
            return json_answer({"errors": [entry(cause)]}, error.status_code)
        case RequestValidationError():
            errors = [
                entry(str(one["msg"]), where=".".join(map(str, one["loc"])))
                for one in error.errors()[:12]
            ]
            return json_answer({"errors": errors}, 400)
    text = "".join(traceback.format_exception(error))
    logging.getLogger("samecurve_products.page").error("%s", redact(printable(text)))
    cause = f"the server failed: {type(error).__name__}: {error}"
    return json_answer({"errors": [entry(cause, "the terminal of samecurve ui shows more")]}, 500)
