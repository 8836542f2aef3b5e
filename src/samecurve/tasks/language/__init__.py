"""A decoder that learns to continue text."""

from samecurve.tasks import TaskEntry
from samecurve.tasks.language.sections import LanguageData, LanguageModel

ENTRY = TaskEntry(
    classes={
        "torch": "samecurve.tasks.language.torch_task:TorchLanguage",
        "jax": "samecurve.tasks.language.jax_task:JaxLanguage",
    },
    engine_free="samecurve.tasks.language.task:LanguageTask",
    model=LanguageModel,
    data=LanguageData,
)
