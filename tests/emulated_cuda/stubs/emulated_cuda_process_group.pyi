"""The module that native/process_group.cpp makes, for mypy."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

class Options:
    timeout: timedelta
    group_name: str
    group_desc: str
    global_ranks_in_group: list[int]

class PythonBackend:
    """torch's Backend: its own methods with other arguments are those of the deriving class."""

    def __init__(self, rank: int, size: int, name: str) -> None: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    @property
    def group_uid(self) -> str: ...
    @property
    def group_description(self) -> str: ...

def wait_all(works: Sequence[Any]) -> None: ...
