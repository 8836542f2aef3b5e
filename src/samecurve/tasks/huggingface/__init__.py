"""Any causal language model of the transformers library, from a directory or a config."""

from samecurve.tasks import TaskEntry
from samecurve.tasks.huggingface.sections import HFData, HFModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve.tasks.huggingface.torch_task:TorchHuggingFace"},
    engine_free="samecurve.tasks.huggingface.task:HuggingFaceTask",
    model=HFModel,
    data=HFData,
    libraries=("transformers.modeling_utils",),
)
