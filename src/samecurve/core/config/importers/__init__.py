"""Configs of other tools, told by their shape and read field by field as one of ours.

Pure: a document in, a document and what became of each field out.
"""

from samecurve.core.config.document import Document
from samecurve.core.config.importers import onetrainer, oxidizr
from samecurve.core.config.importers.fields import ConvertedConfig as ConvertedConfig

KINDS = {
    oxidizr.TOOL: "a `trainer:` section beside `model:`",
    onetrainer.TOOL: "`multi_gpu` or `enable_multi_gpu`",
}


def convert(document: Document) -> ConvertedConfig | None:
    """None: a config of our own, or of no kind that is known."""
    if oxidizr.matches(document):
        return oxidizr.convert(document)
    if onetrainer.matches(document):
        return onetrainer.convert(document)
    return None
