"""The routes of a new run: bases, form, plan, data, saving and starting it; and of the queue."""

import json
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from starlette.responses import Response

from samecurve.seam import Call, signal_group, start_process, wait_for
from samecurve_products.page.answers import json_answer, json_body
from samecurve_products.page.errors import RefusedError, shown_error
from samecurve_products.page.form.plan_worker import PlanRefusedError
from samecurve_products.page.jobs.desk import Desk
from samecurve_products.report.redact import redact_blocks

Body = Annotated[dict[str, Any], Depends(json_body)]
_SENT = ("base", "values", "name")  # what a request about a draft may have
_DATA_SECONDS = 180.0
_MOST_DATA = 1 << 26  # bytes
_MOST_AT_ONCE = 6  # processes that read data
_DATA_PLACES = threading.BoundedSemaphore(_MOST_AT_ONCE)
_NO_DATA = "`samecurve data show -f FILE` on a terminal has no time limit"


def form_routes(desk: Desk) -> APIRouter:
    """The routes, served from a desk."""
    router = APIRouter()
    _add_draft(router, desk)
    _add_queue(router, desk)
    return router


def _add_draft(router: APIRouter, desk: Desk) -> None:
    """Routes about a draft of a run, which begins as a base with values."""

    @router.get("/api/form/bases")
    def bases() -> Response:
        return json_answer(desk.ask("bases", {}))

    @router.post("/api/form")
    def form(body: Body) -> Response:
        return json_answer(desk.ask("form", _draft(body)))

    @router.post("/api/plan")
    def plan(body: Body) -> Response:
        return json_answer(_plan(desk, _draft(body)))

    @router.post("/api/save")
    def save(body: Body) -> Response:
        return json_answer(desk.ask("save", _draft(body)))

    @router.post("/api/start")
    def start(body: Body) -> Response:
        return json_answer({"job": desk.submit(_draft(body), at_once=True)})

    @router.post("/api/queue")
    def enqueue(body: Body) -> Response:
        return json_answer({"job": desk.submit(_draft(body), at_once=False)})

    @router.post("/api/data")
    def data(body: Body) -> Response:
        return json_answer(_data(desk, _draft(body)))


def _add_queue(router: APIRouter, desk: Desk) -> None:
    """Routes about the jobs."""

    @router.get("/api/queue")
    def queue() -> Response:
        return json_answer({"jobs": redact_blocks(desk.rows()), "paused": desk.is_paused()})

    @router.delete("/api/queue/{job_id}")
    def remove(job_id: str, body: Body) -> Response:
        del body  # read, so that it is checked
        desk.remove(_job_id(job_id))
        return json_answer({"message": "removed"})

    @router.post("/api/queue/{job_id}/{direction}")
    def move(job_id: str, direction: Literal["up", "down"], body: Body) -> Response:
        del body
        desk.move(_job_id(job_id), direction)
        return json_answer({"message": f"moved {direction}"})


def _draft(body: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a request that the worker gets: nothing beside base, values and name."""
    return {name: body[name] for name in _SENT if name in body}


def _job_id(text: str) -> str:
    """RefusedError: the text can't be a job's id."""
    if len(text) != 12 or not text.isalnum():
        raise RefusedError(404, "there is no such job", "load the list again")
    return text


def _plan(desk: Desk, sent: Mapping[str, Any]) -> dict[str, Any]:
    answer = desk.ask("plan", sent)
    answer["errors"] = list(map(shown_error, answer["errors"]))
    for name in ("blocks", "worlds", "notes"):
        answer[name] = redact_blocks(answer[name])
    return answer


def _data(desk: Desk, sent: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks of `samecurve data show`, in a process of its own with a time limit.

    PlanRefusedError: the draft has errors, or its data can't be read.
    """
    config = desk.ask("config", sent)
    with tempfile.TemporaryDirectory(prefix="samecurve-data-") as folder:
        file = Path(folder) / f"{config['name']}.yaml"
        file.write_text(config["yaml"], encoding="utf-8")
        roots = json.dumps([str(root) for root in desk.roots])
        call = Call(
            "samecurve_products.page.form.show_data", (roots, str(file), "--json"), new_session=True
        )
        if not _DATA_PLACES.acquire(blocking=False):
            cause = f"the data of {_MOST_AT_ONCE} configs are being read already"
            raise PlanRefusedError([{"cause": cause, "remedy": "try again in a minute"}])
        try:
            output = _output(call, Path(config["home"]))
        finally:
            _DATA_PLACES.release()
    try:
        values = json.loads(output)
    except ValueError:
        cause = "reading the data failed: its process has ended without an answer"
        raise PlanRefusedError([{"cause": cause, "remedy": _NO_DATA}]) from None
    if "errors" in values:
        texts = [{k: v.replace(f"{folder}/", "") for k, v in e.items()} for e in values["errors"]]
        raise PlanRefusedError(texts)
    return {"blocks": redact_blocks(values["blocks"])}


def _output(call: Call, home: Path) -> bytes:
    """The output of the call. PlanRefusedError: it takes too long, or writes too much."""
    with tempfile.TemporaryFile() as written:
        process = start_process(
            call, stdin=DEVNULL, stdout=written.fileno(), stderr=DEVNULL, cwd=home
        )
        try:
            if not wait_for([process], _DATA_SECONDS):
                cause = f"reading the data took more than {_DATA_SECONDS:g} s"
                raise PlanRefusedError([{"cause": cause, "remedy": _NO_DATA}])
        finally:
            signal_group(process.pid)  # the processes that it started, too
            process.wait()
        if os.fstat(written.fileno()).st_size > _MOST_DATA:
            cause = f"what is read takes more than {_MOST_DATA >> 20} MiB to show"
            raise PlanRefusedError([{"cause": cause, "remedy": _NO_DATA}])
        written.seek(0)
        return written.read()
