"""Configs of other tools, recognised by their shape and read field by field as one of ours.

A tool's table is imported only for a config of that tool.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.seam import Document

if TYPE_CHECKING:
    from samecurve_products.convert.converted_config import ConvertedConfig

SHAPES = {
    "Oxidizr": "a `trainer:` section beside `model:`",
    "OneTrainer": "`multi_gpu` or `enable_multi_gpu`",
    "axolotl": "`base_model` beside `datasets`",
    "LLaMA-Factory": "`model_name_or_path` beside `stage`",
    "kohya": "`pretrained_model_name_or_path` beside `network_module` or `train_batch_size`",
    "ai-toolkit": "`job` beside `config: {process: [...]}`",
    "SimpleTuner": "`model_family` or `data_backend_config`",
}
_OURS = {"task", "engine", "batch", "optimizer", "schedule", "train", "devices"}
_AXOLOTL = {"datasets", "pretraining_dataset", "micro_batch_size", "sequence_len"}
_LLAMA_FACTORY = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"}
_SIMPLE_TUNER = {"model_family", "data_backend_config"}
_KOHYA = {"network_module", "train_batch_size", "dataset_config", "train_data_dir"} | {
    *("max_train_steps", "max_train_epochs", "output_name", "optimizer_type")
}


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
    return _trainer_of_pictures(document)


def _trainer_of_pictures(document: Document) -> str | None:
    """kohya, ai-toolkit or SimpleTuner, if the config is of one of them."""
    value = document.value
    inner = {name: item for name, item in value.items() if isinstance(item, dict)}
    if "job" in value and isinstance(inner.get("config", {}).get("process"), list):
        return "ai-toolkit"
    plain = {name.removeprefix("--") for name in [*value, *inner.get("config", {})]}
    if plain & _SIMPLE_TUNER:
        return "SimpleTuner"
    names = {name for section in [value, *inner.values()] for name in section}
    sets = value.get("datasets")
    has_subsets = isinstance(sets, list) and any(
        isinstance(item, dict) and "subsets" in item for item in sets
    )
    if has_subsets or ("pretrained_model_name_or_path" in names and names & _KOHYA):
        return "kohya"
    return None


def convert(
    document: Document, folder: Path | None = None, within: Path | None = None
) -> "ConvertedConfig | None":
    """The document as a config of ours. None: it is one already, or of no known tool.

    folder: that the config lies in, for the files that it names; None: they are not read
    within: the folder that such files must lie below; None: any
    """
    tool = tool_of(document)
    if tool is None:
        return None
    from samecurve_products.convert.companions import Companions
    from samecurve_products.convert.rules import convert_config

    companions = Companions(folder, within)
    return convert_config(tool.lower().replace("-", ""), document, companions)
