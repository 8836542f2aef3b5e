"""The routes of the pages Compare and Machine."""

from fastapi import FastAPI
from starlette.responses import Response

from samecurve.ui.answers import json_answer
from samecurve.ui.compare import chosen_runs, comparison, exact_comparison
from samecurve.ui.machine_page import machine_page
from samecurve.ui.site import Site


def add(app: FastAPI, site: Site) -> None:
    """Add the routes to the application."""

    @app.get("/api/compare")
    def compare(runs: str = "") -> Response:
        return json_answer(comparison(site, chosen_runs(site, runs)))

    @app.get("/api/compare/exact")
    def exact(runs: str = "") -> Response:
        first, second = chosen_runs(site, runs, most=2)
        return json_answer(exact_comparison(first, second))

    @app.get("/api/machine")
    def machine() -> Response:
        return json_answer(machine_page(site.devices, site.catalogue.roots))
