"""Fields of other programs' configs that the chosen task lacks, and the task that has them.

So such a field is refused with a way to go on.
"""

_EXPERTS = ("a mixture of experts", "huggingface")
_LATENT = ("latent attention", "huggingface")
_MAMBA = ("Mamba layers", "huggingface")
_PARTS = {
    "model.num_experts": _EXPERTS,
    "model.experts_per_tok": _EXPERTS,
    "model.shared_expert_enabled": _EXPERTS,
    "model.kv_latent_dim": _LATENT,
    "model.q_latent_dim": _LATENT,
    "model.d_rope": _LATENT,
    "model.mamba_layers": _MAMBA,
    "model.mamba2_": _MAMBA,
    "model.mamba3_": ("Mamba-3 layers", ""),
    "model.arch": ("a vision model", "vision"),
    "model.cssm": ("a vision model", "vision"),
    "data.mode": ("sensor channels", "timeseries"),
}
_SERVED_BY = {
    "huggingface": "task huggingface has it, under its library's names (docs/huggingface.md); ",
    "vision": "task vision of a later version will have it; ",
    "timeseries": "task timeseries has it: -f models/har.yaml (docs/timeseries.md); ",
}
USER_TASK = "your own: path/to/file.py:MyTask (docs/tasks.md)"
USER_TASK_HINT = "a user task does it today: task: FILE.py:CLASS (docs/tasks.md)"


def task_that_has(key: str) -> str:
    """The task that a key is known to belong to; empty if none is known, or none has it."""
    return _part_of(key)[1]


def task_needed(key: str) -> tuple[str, str] | None:
    """The feature that a key asks for, and the remedy; None: the key is not known.

    The key is one that the config's task lacks.
    """
    what, task = _part_of(key)
    if not what:
        return None
    return what, f"{_SERVED_BY.get(task, '')}{USER_TASK_HINT}; or leave it out"


def _part_of(key: str) -> tuple[str, str]:
    """The feature that a key asks for, and the task that has it; empty where not known."""
    for name, part in _PARTS.items():
        if key == name or (name.endswith("_") and key.startswith(name)):
            return part
    return "", ""
