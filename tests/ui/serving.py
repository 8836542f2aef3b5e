"""A server of the web page inside the test's process, and runs made by hand for it to show."""

import fcntl
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from samecurve_products.page.app import make_app
from samecurve_products.page.guard import Guard
from samecurve_products.page.hosts import listen, own_names
from samecurve_products.page.roots import Root
from samecurve_products.page.serve import server_config
from samecurve_products.page.session import Session
from samecurve_products.page.site import Site

OLD_RUN = Path(__file__).parents[1] / "compat" / "old_run" / "run"
_PLAN = json.loads((OLD_RUN / "plan.json").read_text())
BEGAN = 1_795_000_000.0  # seconds since 1970


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cause(self) -> str:
        """The cause of the first error."""
        return str(self.json["errors"][0]["cause"])


@dataclass
class Served:
    """A server, and requests to it as a browser sends them."""

    port: int
    session: Session
    site: Site
    cookie: str = ""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        cookie: bool = True,
    ) -> Answer:
        """A request as it stands. A header whose value is '' is left out."""
        sent = {"Host": self.host, **({"Cookie": self.cookie} if cookie else {}), **(headers or {})}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            if body is not None and "Transfer-Encoding" not in sent:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            received = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, received, answer.read())

    def write(self, path: str, body: object = None, method: str = "POST") -> Answer:
        """A request that changes something, with all that the page sends."""
        headers = {
            "X-Samecurve": "1",
            "Content-Type": "application/json",
            "Origin": f"http://{self.host}",
        }
        return self.ask(path, method, json.dumps(body or {}).encode(), headers)

    def rows(self) -> dict[str, Any]:
        """The list of runs, by name."""
        self.site.catalogue.look_again()
        return {row["name"]: row for row in self.ask("/api/runs").json["runs"]}

    def run_id(self, name: str) -> str:
        return str(self.rows()[name]["id"])


@contextmanager
def serving(*roots: Path) -> Iterator[Served]:
    """A server on a free port, with a session whose cookie was fetched."""
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    session, site = Session(port), Site([Root.of(root) for root in roots])
    guard = Guard(make_app(site), session, own_names("127.0.0.1", allow_remote=False))
    server = uvicorn.Server(server_config(guard))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    site.begin()
    thread.start()
    served = Served(port, session, site)
    try:
        answer = served.ask(f"/?token={session.token}", cookie=False)
        served.cookie = answer.headers["set-cookie"].partition(";")[0]
        yield served
    finally:
        server.should_exit = True
        thread.join()
        site.end()
        bound.close()


def make_run(home: Path, *lines: Mapping[str, Any], steps: int = 100, **plan: Any) -> Path:
    """A run directory with a journal of these lines."""
    home.mkdir(parents=True)
    values = {**_PLAN, "plan": {**_PLAN["plan"], "steps": steps, **plan}}
    (home / "plan.json").write_text(json.dumps(values))
    (home / "config.yaml").write_text((OLD_RUN / "config.yaml").read_text())
    append(home, *lines)
    return home


def append(home: Path, *lines: Mapping[str, Any]) -> None:
    with open(home / "journal.jsonl", "a") as file:
        file.writelines(json.dumps({"time": BEGAN, "step": 0, **line}) + "\n" for line in lines)


def planned(attempt: str = "1-1", **values: Any) -> dict[str, Any]:
    plan = {"kind": "planned", "attempt": attempt, "plan": _PLAN["plan"]}
    return {"time": BEGAN, **plan, **values}


def step(number: int, loss: float = 2.0, **values: Any) -> dict[str, Any]:
    measured = {"samples_per_second": 320.0, "tokens_per_second": 64_000.0, "seconds": 0.1}
    line = {"time": BEGAN + number, "step": number, "kind": "step", "loss": loss}
    more = {"grad_norm": 1.0, "lr": 1e-3, "wait_seconds": 0.0, "memory_bytes": 1 << 20}
    return {**line, **measured, **more, **values}


@contextmanager
def locked(home: Path, **values: Any) -> Iterator[None]:
    """Hold a run's lock, as its launcher does."""
    entry = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time(), **values}
    with open(home / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(entry))
        file.flush()
        yield
