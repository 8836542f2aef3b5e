"""The workspaces of cuBLAS. With a fixed size its products repeat to the last bit, as runs with the
same bits need. cuBLAS and torch read the variable once, when they first compute.
"""

from collections.abc import MutableMapping

from samecurve.errors import NotSameBitsError

_VARIABLE, _SETTING = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
REPEATING_WORKSPACE = {_VARIABLE: _SETTING}
_REPEATING = {_SETTING, ":16:8"}


def set_repeating_workspace(environment: MutableMapping[str, str], *, cuda_started: bool) -> None:
    """Fix the size of cuBLAS' workspaces, for deterministic kernels on NVIDIA GPUs.

    cuda_started: CUDA has started in this process, so that the variable can't be set any more.

    NotSameBitsError: products would not repeat.
    """
    value = environment.get(_VARIABLE)
    if value in _REPEATING:
        return
    remedy = (
        f"{_VARIABLE}={_SETTING} before samecurve or Python starts (in a notebook: %env {_VARIABLE}"
        f"={_SETTING} in the first cell of a fresh kernel)"
    )
    if value is not None:
        cause = f"{_VARIABLE}={value}: with it cuBLAS' products differ from run to run"
        raise NotSameBitsError(cause, remedy)
    if cuda_started:
        cause = (
            f"something has started CUDA in this process without {_VARIABLE}, which is read once:"
            " cuBLAS' products may differ from run to run"
        )
        remedy += ", or a task file that uses no GPU while it is imported"
        raise NotSameBitsError(cause, remedy)
    environment.update(REPEATING_WORKSPACE)
