"""Configs of other tools, told by their shape and read field by field as one of ours.

Pure: a document in, a document and what became of each field out.
"""

from samecurve.convert import axolotl, llamafactory, onetrainer, oxidizr
from samecurve.convert.foreign_fields import ConvertedConfig as ConvertedConfig
from samecurve.core.config.document import Document

KINDS = {
    oxidizr.TOOL: "a `trainer:` section beside `model:`",
    onetrainer.TOOL: "`multi_gpu` or `enable_multi_gpu`",
    axolotl.TOOL: "`base_model` beside `datasets`",
    llamafactory.TOOL: "`model_name_or_path` beside `stage`",
}


def convert(document: Document) -> ConvertedConfig | None:
    """None: a config of our own, or of no kind that is known."""
    if oxidizr.matches(document):
        return oxidizr.convert(document)
    if onetrainer.matches(document):
        return onetrainer.convert(document)
    if axolotl.matches(document):
        return axolotl.convert(document)
    if llamafactory.matches(document):
        return llamafactory.convert(document)
    return None
