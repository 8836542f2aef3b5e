"""The workspaces of cuBLAS. With a fixed size its products repeat to the last bit, as train.exact
needs. cuBLAS and torch read the variable once, when they first compute.
"""

from collections.abc import MutableMapping

from samecurve.errors import UserError

_VARIABLE, _SETTING = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
REPEATING_WORKSPACE = {_VARIABLE: _SETTING}
_REPEATING = {_SETTING, ":16:8"}


def set_repeating_workspace(environment: MutableMapping[str, str], *, cuda_started: bool) -> None:
    """Fix the size of cuBLAS' workspaces, for train.exact on NVIDIA GPUs.

    cuda_started: CUDA has started in this process, so that the variable can't be set any more.

    UserError: products would not repeat.
    """
    value = environment.get(_VARIABLE)
    if value in _REPEATING:
        return
    remedy = (
        f"{_VARIABLE}={_SETTING} before samecurve or Python starts (in a notebook: %env {_VARIABLE}"
        f"={_SETTING} in the first cell of a fresh kernel); or leave out --exact"
    )
    if value is not None:
        cause = f"{_VARIABLE}={value}: with it cuBLAS' products differ from run to run"
        raise UserError(cause, remedy, "train.exact")
    if cuda_started:
        cause = (
            f"something has started CUDA in this process without {_VARIABLE}, which is read once:"
            " cuBLAS' products may differ from run to run"
        )
        remedy += ", or a task file that uses no GPU while it is imported"
        raise UserError(cause, remedy, "train.exact")
    environment.update(REPEATING_WORKSPACE)
