"""Where a task's code draws numbers: the lines that are named."""

import linecache
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from samecurve.features.guard.blamed_calls import Recording
from samecurve.features.guard.watched_lines import watch
from samecurve.torch_engine.users_code.side_effects import GeneratorStates

LIBRARY = f"{sysconfig.get_path('purelib')}/somelib/noise.py"
SOURCE = "import numpy as np\n\n\ndef mask(rows):\n    return np.random.rand(rows)\n"


def library_function() -> Callable[[int], Any]:
    """mask() of a library that draws by itself."""
    linecache.cache[LIBRARY] = len(SOURCE), None, SOURCE.splitlines(keepends=True), LIBRARY
    names: dict[str, Any] = {}
    exec(compile(SOURCE, LIBRARY, "exec"), names)
    return names["mask"]  # type: ignore[no-any-return]


def draws_of(run: Callable[[], object]) -> list[tuple[str, str]]:
    generators = GeneratorStates(torch.device("cpu"))
    return [(draw.function, draw.where) for draw in watch(run, generators, {}).draws]


def line_of(function: Callable[..., object], after: int) -> str:
    return f"tests/torch_engine/test_split_diagnosis.py:{function.__code__.co_firstlineno + after}"


def test_a_library_that_draws_is_named_with_the_line_that_calls_it() -> None:
    mask = library_function()

    def loss() -> Any:
        return mask(3).sum()

    function = "np.random.rand in somelib/noise.py:5"
    assert draws_of(loss) == [(function, line_of(loss, 1))]


def test_a_library_called_by_no_line_of_the_users_is_named_alone() -> None:
    """Not whoever called this program, beyond the trial."""
    mask = library_function()
    names: dict[str, Any] = {"mask": mask}
    exec(compile("def loss():\n    return mask(3)\n", "<frozen ours>", "exec"), names)
    assert draws_of(names["loss"]) == [("np.random.rand", "somelib/noise.py:5")]


def test_what_the_trial_seeds_between_the_tasks_calls_is_no_draw() -> None:
    """As collate() returns into our own code, which then seeds numpy before the loss."""

    def collate() -> int:
        return 3

    def loss() -> int:
        return 3

    names: dict[str, Any] = {"collate": collate, "loss": loss, "seed": np.random.seed}
    ours = "def trial():\n    collate()\n    seed(7)\n    loss()\n"
    exec(compile(ours, "<frozen ours>", "exec"), names)
    before = np.random.get_state()
    try:
        assert draws_of(names["trial"]) == []
    finally:
        np.random.set_state(before)


def test_a_call_of_torch_is_placed_within_the_trial() -> None:
    names: dict[str, Any] = {"torch": torch}
    ours = "def trial():\n    return torch.ones(3)\n"
    exec(compile(ours, "<frozen ours>", "exec"), names)
    recording = Recording()
    exec(
        compile("with recording:\n    trial()", "<frozen ours>", "exec"),
        {**names, "recording": recording},
    )
    assert [call.where for call in recording.calls] == [""]
