"""The routes of runs: the list, a run's page, its logs and pictures, and what is done to it."""

from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from starlette.responses import Response

from samecurve.observe.pictures import png
from samecurve.seam import is_live
from samecurve_products.page import actions
from samecurve_products.page.answers import json_answer, json_body, text_of
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.jobs.desk import JobCommand
from samecurve_products.page.kill import kill
from samecurve_products.page.logs import log_files, read_log
from samecurve_products.page.site import Site
from samecurve_products.report.redact import redact_blocks

Body = Annotated[dict[str, Any], Depends(json_body)]
_MOST_SEARCH = 200  # characters


def add(app: FastAPI, site: Site) -> None:
    """Add the routes to the application."""

    @app.get("/api/runs")
    def runs() -> Response:
        return json_answer(
            {"runs": site.runs.rows(site.catalogue.runs()), "jobs": redact_blocks(site.desk.rows())}
        )

    @app.get("/api/runs/{run_id}/page")
    def page(run_id: str, generation: str = "", count: int = 0, blocks: str = "") -> Response:
        listed = site.find(run_id)
        text = site.pages.answer(listed, generation, count, blocks)
        return Response(text, media_type="application/json")

    @app.get("/api/runs/{run_id}/logs")
    def logs(run_id: str, file: str = "", search: str = "", before: int | None = None) -> Response:
        listed = site.find(run_id)
        files = log_files(listed.run.logs, site.job_logs(listed))
        lines = read_log(files, file, search=search[:_MOST_SEARCH], before=before)
        return json_answer(lines)

    @app.get("/api/runs/{run_id}/picture/{name}")
    def picture(run_id: str, name: str) -> Response:
        listed = site.find(run_id)
        if Path(name).name != name or not name.endswith(".png"):
            raise RefusedError(404, "this run has no such picture")
        try:
            content = png(listed.home, f"samples/{name}")
        except (OSError, ValueError):
            raise RefusedError(404, "this run has no such picture") from None
        # a picture of a step is written once
        headers = {"cache-control": "private, max-age=3600"}
        return Response(content, media_type="image/png", headers=headers)

    @app.post("/api/runs/{run_id}/{action}")
    def act(run_id: str, action: str, body: Body) -> Response:
        message = _act(site, run_id, action, body)
        site.catalogue.look_again()
        return json_answer({"message": message})

    @app.delete("/api/runs/{run_id}")
    def delete(run_id: str, body: Body) -> Response:
        del body  # read, so that it is checked
        listed = site.find(run_id)
        message = actions.delete(listed)
        site.pages.forget(listed)
        site.catalogue.look_again()
        return json_answer({"message": message})


def _act(site: Site, run_id: str, action: str, body: dict[str, Any]) -> str:
    """Do what a button asks for. Returns a sentence that says what happens."""
    listed = site.find(run_id)
    match action:
        case "kill":
            return kill(listed.run)
        case "stop" | "save":
            return actions.request(listed, action)
        case "resume":
            devices, strategy = text_of(body, "devices"), text_of(body, "strategy")
            return _start(site, actions.resume_command(listed, devices, strategy))
        case "evaluate" | "sample" if is_live(listed.run):
            return actions.request(listed, action)
        case "evaluate":
            return _start(site, actions.checkpoint_command(listed, "eval"))
        case "sample":
            return _start(site, actions.checkpoint_command(listed, "sample"))
    raise RefusedError(404, f"there is no action {action[:40]!r}", ", ".join(actions.ACTIONS))


def _start(site: Site, command: JobCommand) -> str:
    site.desk.start_command(command)
    return f"started: {command.name}"
