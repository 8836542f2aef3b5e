"""Classifiers of images: attention, and state spaces in the frequencies of the image."""

from samecurve.tasks import TaskEntry
from samecurve.tasks.vision.sections import VisionData, VisionModel, engines_of

ENTRY = TaskEntry(
    classes={
        "torch": "samecurve.tasks.vision.torch_task:TorchVision",
        "jax": "samecurve.tasks.vision.jax_task:JaxVision",
    },
    engine_free="samecurve.tasks.vision.task:VisionTask",
    model=VisionModel,
    data=VisionData,
    engines_of=engines_of,
)
