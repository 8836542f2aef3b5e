"""Any causal language model of the transformers library, from a directory or a config."""

from samecurve.tasks.huggingface.sections import HFData, HFModel
from samecurve.tasks.registry import TaskEntry

ENTRY = TaskEntry(
    classes={"torch": "samecurve.tasks.huggingface.torch_task:TorchHuggingFace"},
    engine_free="samecurve.tasks.huggingface.task:HuggingFaceTask",
    described_by_engine=True,
    model=HFModel,
    data=HFData,
    libraries=("transformers.modeling_utils",),
    built_in=True,
)
