"""Functions that axolotl.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.hf_trainer import has_no_warmup
from samecurve_products.convert.hf_trainer import warmup as read_warmup
from samecurve_products.convert.values import epochs

_OUTSIDE = {"lm_head", "embed_tokens", "embed_out", "wte", "wpe"}  # no linear layers of blocks
_WARMUP, _MOST_WARMUP = 0.03, 100  # share of the run, steps
_SHARE, _MISSING = "that share of the run, rounded down", "3 % of the run"

_SERVED: Mapping[str, tuple[object, ...]] = {  # field of a data set -> values that are served
    "split": ("train",),
    "field": ("text",),
    "field_messages": ("messages",),
    "message_field_role": ("role",),
    "message_field_content": ("content",),
    "message_field_training": ("train",),
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
    "roles": ({"user": ["user"], "assistant": ["assistant"]},),
}
_TYPES = (None, "completion", "chat_template", "alpaca")
_ROWS = (
    "rows of `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"
    " (docs/huggingface-data.md); -d FILE"
)

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    # a template's file
    "jinja_file": lambda value: isinstance(value, str) and value.endswith(".jinja"),
    "sharded": lambda value: bool(_fsdp_words(value)),  # `fsdp` names any of its words
    # whole parameters stay between forward and backward
    "shard_grad_op": lambda value: "shard_grad_op" in _fsdp_words(value),
    "offload": lambda value: "offload" in _fsdp_words(value),  # parameters are in the host's memory
}


def data_sets(foreign: ForeignConfig) -> None:
    """Read the paths of the data sets; refuse all if one has a field that is not served."""
    sets = foreign.value("datasets", [])
    sources: list[object] = []
    fault = "" if sets and isinstance(sets, list) else "is no list of data sets"
    for index, one in enumerate(sets if isinstance(sets, list) else ()):
        fault = fault or _fault_of(one, f"data set {index + 1}: ")
        if isinstance(one, dict):
            paths = one.get("data_files") or one.get("path")
            sources += paths if isinstance(paths, list) else [paths]
    if fault:
        foreign.refuse("datasets", fault, _ROWS, "data.source")
        foreign.keep_refused("data.source", [str(source) for source in sources] or "")
    else:
        why = "a directory or file of this machine: nothing is downloaded"
        foreign.convert("datasets", "data.source", sources, why)


def _fault_of(one: object, where: str) -> str:
    """Why a data set is not served; '' if it is."""
    if not isinstance(one, Mapping):
        return f"{where}is no mapping"
    if one.get("type") not in _TYPES:
        return f"{where}type {one.get('type')} is not served"
    for name, value in one.items():
        if name in {"path", "data_files", "ds_type", "type"} or value is None:
            continue
        if name not in _SERVED:
            return f"{where}{name} is not served"
        if value not in _SERVED[name]:
            return f"{where}{name} {value} is not served"
    return ""


def beyond_blocks(targets: object) -> bool:
    """Whether a name is of the embedding or the output layer."""
    names = targets if isinstance(targets, list) else [targets]
    return any(str(name).rpartition(".")[2] in _OUTSIDE for name in names)


def warmup(foreign: ForeignConfig) -> None:
    """Read the warm-up: steps, a share of the run, or the tool's default.

    That tool rounds a share down to whole steps, and makes two of a single step.
    """
    if has_no_warmup(foreign):
        return
    length = foreign.document.value.get("train", {}).get("steps")
    steps, share = foreign.value("warmup_steps"), foreign.value("warmup_ratio")
    if steps == 1:
        foreign.convert("warmup_steps", "schedule.warmup", 2, "one step of warm-up becomes two")
        foreign.ignore("warmup_ratio", "warmup_steps is there, and wins")
    elif steps is None and isinstance(share, int | float) and share and isinstance(length, int):
        foreign.convert("warmup_ratio", "schedule.warmup", _whole(share * length), _SHARE)
    elif steps is not None or share is not None:
        read_warmup(foreign)
    elif isinstance(length, int):
        foreign.add_default(
            "schedule.warmup", min(_whole(_WARMUP * length), _MOST_WARMUP), _MISSING
        )
    elif isinstance(length, str) and length.endswith("ep"):
        part = epochs(_WARMUP * float(length.removesuffix("ep")))
        why = f"{_MISSING}, {_MOST_WARMUP} steps at most: of a longer run"
        foreign.add_default("schedule.warmup", part, f"{why} --set schedule.warmup=100")


def _whole(steps: float) -> int:
    return 2 if int(steps) == 1 else int(steps)


def _fsdp_words(value: object) -> list[object]:
    return value if isinstance(value, list) else list(str(value or "").split())


def part_of_epoch(times: int) -> str:
    """Epochs between two of so many events in an epoch: 4 -> '0.25ep'."""
    return f"{1 / times:.9f}".rstrip("0").rstrip(".") + "ep"


def only_kernels(plugins: object) -> bool:
    """Whether all plugins only bring faster kernels, which change no curve."""
    names = [] if plugins is None else plugins
    kernels = ("liger", "cut_cross_entropy")
    return isinstance(names, list) and all(
        any(part in str(name) for part in kernels) for name in names
    )
