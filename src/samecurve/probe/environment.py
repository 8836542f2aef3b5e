"""The environment of processes that this process starts, or becomes."""

import os
from collections.abc import Mapping


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with these variables set, for a child process."""
    return {**os.environ, **variables}


def replace_environment(environment: Mapping[str, str]) -> None:
    """Give this process another environment, as if it had been started with it."""
    os.environ.clear()
    os.environ.update(environment)
