"""Any causal language model of the transformers library, from a directory or a config."""

from samecurve.seam import TaskEntry
from samecurve_products.text.huggingface.sections import HFData, HFModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve_products.text.huggingface.torch_task:TorchHuggingFace"},
    engine_free="samecurve_products.text.huggingface.task:HuggingFaceTask",
    model=HFModel,
    data=HFData,
    libraries=("transformers.modeling_utils",),
)
