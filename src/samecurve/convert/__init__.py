"""Configs of other tools, recognised by their shape and read field by field as one of ours.

A tool's table is imported only for a config of that tool.
"""

from typing import TYPE_CHECKING

from samecurve.core.config.document import Document

if TYPE_CHECKING:
    from samecurve.convert.converted_config import ConvertedConfig

SHAPES = {
    "Oxidizr": "a `trainer:` section beside `model:`",
    "OneTrainer": "`multi_gpu` or `enable_multi_gpu`",
    "axolotl": "`base_model` beside `datasets`",
    "LLaMA-Factory": "`model_name_or_path` beside `stage`",
}
_OURS = {"task", "engine", "batch", "optimizer", "schedule", "train", "devices"}
_AXOLOTL = {"datasets", "pretraining_dataset", "micro_batch_size", "sequence_len"}
_LLAMA_FACTORY = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"}


def tool_of(document: Document) -> str | None:
    """The tool whose config this is, by its shape. None: a config of ours, or of no known tool."""
    names = document.value.keys()
    if isinstance(document.value.get("trainer"), dict) and not _OURS & names:
        return "Oxidizr"
    has_switch = bool({"multi_gpu", "enable_multi_gpu"} & names)
    if (has_switch or {"training_method", "model_type"} <= names) and not (
        {"task", "batch", "train"} & names
    ):
        return "OneTrainer"
    if {"task", "model", "train"} & names:
        return None
    if "base_model" in names and _AXOLOTL & names:
        return "axolotl"
    if "model_name_or_path" in names and _LLAMA_FACTORY & names:
        return "LLaMA-Factory"
    return None


def convert(document: Document) -> "ConvertedConfig | None":
    """The document as a config of ours. None: it is one already, or of no known tool."""
    tool = tool_of(document)
    if tool is None:
        return None
    from samecurve.convert.rules import convert_config

    return convert_config(tool.lower().replace("-", ""), document)
