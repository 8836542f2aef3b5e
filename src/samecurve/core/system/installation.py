"""How this copy of the program was installed, and the commands that install more."""

import json
import shlex
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse


def install_command(extra: str) -> str:
    """The command that adds an extra (jax, report, ...) to this very copy of the program.

    A checkout is named by its path. An installed wheel is named by name: pip then takes the copy
    that is there, and fetches only what the extra lists.
    """
    source = checkout()
    if source:
        return pip_command("install", "-e", f"{source}[{extra}]")
    return pip_command("install", f"samecurve[{extra}]")


def checkout() -> Path | None:
    """The directory with pyproject.toml that this copy runs from, if it runs from one."""
    root = Path(__file__).resolve().parents[4]
    if (root / "pyproject.toml").is_file():
        return root
    try:
        origin = metadata.distribution("samecurve").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(origin)["url"]) if origin else None
    if url is None or url.scheme != "file":
        return None
    directory = Path(unquote(url.path))  # `pip install DIRECTORY`, without -e
    return directory if (directory / "pyproject.toml").is_file() else None


def pip_command(action: Literal["install", "uninstall"], *requirements: str) -> str:
    """pip's command for this Python, or uv's where that is what installs here."""
    words = " ".join(map(shlex.quote, requirements))
    if find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip {action} --python {shlex.quote(sys.executable)} {words}"
    yes = " -y" if action == "uninstall" else ""
    return f"{_pip()} {action}{yes} {words}"


def installed_by_conda(package: str) -> bool:
    try:
        installer = metadata.distribution(package).read_text("INSTALLER") or ""
    except metadata.PackageNotFoundError:
        return False
    return installer.strip() == "conda"


def _pip() -> str:
    """`pip` where that word means this Python's, else this Python by its path."""
    on_path = shutil.which("pip")
    if on_path and Path(on_path).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
