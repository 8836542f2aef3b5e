"""The plan worker: reads requests as JSON lines on stdin, and answers each with a line on stdout.

Forms and plans look at a user's own task, which is code. So that is done here, in a process of its
own: what the code prints goes to stderr, and if it ends the process, the page says so and starts
another. The worker ends with the server, and when stdin is closed.
"""

import json
import os
import traceback
from typing import TYPE_CHECKING, Any

from samecurve.errors import message_of
from samecurve.processes import fork_server
from samecurve.run.warm_start import FIRST
from samecurve.seam import SamecurveError
from samecurve_products.page.form.answers import Answer, Answers, RefusedError
from samecurve_products.page.form.draft import error_json
from samecurve_products.page.form.places import Roots
from samecurve_products.page.form.task_places import have_changed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RESTART = "restart"  # the answer where a user's file has changed since it was imported
_FAULT = "the terminal of `samecurve ui` shows where; please report it with that text"


def main(*roots: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's file prints is no answer
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    desk = Answers(Roots.of(roots), server=fork_server(FIRST))
    for line in requests:
        answer: Answer = {RESTART: True} if have_changed(desk.stamps) else _answer(desk, line)
        print(json.dumps(answer, default=str), file=answers, flush=True)
    os._exit(0)  # threads of a user's code are not waited for


def _answer(desk: Answers, line: bytes) -> Answer:
    """The answer to a request. Whatever a user's code raises is one too."""
    try:
        request = json.loads(line)
        verbs: Mapping[str, Callable[[Mapping[str, Any]], Answer]] = {
            "bases": desk.bases,
            "form": desk.form,
            "plan": desk.plan,
            "save": desk.save,
            "start": desk.start,
            "config": desk.config_text,
        }
        return {"answer": verbs[request["verb"]](request)}
    except RefusedError as refused:
        return {"errors": refused.errors}
    except SamecurveError as error:
        return {"errors": [error_json(error, "")]}
    except OSError as error:  # a path of the config that can't be looked at
        cause = f"{error.strerror or message_of(error)}: {str(error.filename or '')[:200]}"
        return {"errors": [{"cause": cause, "remedy": "another path in the form", "where": ""}]}
    except (Exception, SystemExit) as error:  # of a user's file, or a fault of ours
        traceback.print_exc()
        cause = f"{type(error).__name__}: {message_of(error)}"
        return {"errors": [{"cause": cause[:1600], "remedy": _FAULT, "where": ""}]}
