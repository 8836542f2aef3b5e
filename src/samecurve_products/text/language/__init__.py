"""A decoder that learns to continue text."""

from samecurve.seam import TaskEntry
from samecurve_products.text.language.sections import LanguageData, LanguageModel

ENTRY = TaskEntry(
    classes={
        "torch": "samecurve_products.text.language.torch_task:TorchLanguage",
        "jax": "samecurve_products.text.language.jax_task:JaxLanguage",
    },
    engine_free="samecurve_products.text.language.task:LanguageTask",
    model=LanguageModel,
    data=LanguageData,
)
