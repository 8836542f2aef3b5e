"""The files that the browser gets: the live page's own, and those it shares with the frozen page.

Only names that are found in the two directories are served, so a path of a request is never opened.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from samecurve_products.page.errors import RefusedError

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


def own_file(request: Request, name: str) -> Response:
    """A file of page/static."""
    return _answer(request, _directory("samecurve_products.page", "static"), name)


def shared_file(request: Request, name: str) -> Response:
    """A file of report/page."""
    return _answer(request, _directory("samecurve_products.report", "page"), name)


def _directory(package: str, name: str) -> Path:
    return Path(str(files(package))) / name


def _answer(request: Request, directory: Path, name: str) -> Response:
    path = _names(directory).get(name)
    if path is None:
        raise RefusedError(404, f"there is no file {name[:100]!r}")
    status = path.stat()
    tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    media = _MEDIA.get(path.suffix, "text/plain; charset=utf-8")
    return Response(path.read_bytes(), media_type=media, headers=headers)


def _names(directory: Path) -> Mapping[str, Path]:
    """The files in a directory and in those below it, by their path there."""
    return {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(("_", "."))
    }
