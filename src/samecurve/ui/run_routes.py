"""The routes of runs: the list, a run's page, its logs and pictures, and what is done to it."""

from fastapi import FastAPI
from starlette.responses import Response

from samecurve.ui.answers import json_answer
from samecurve.ui.site import Site


def add(app: FastAPI, site: Site) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return json_answer({"runs": site.runs.rows(site.catalogue.runs()), "jobs": []})
