"""Classifiers of images: attention, and state spaces in the frequencies of the image."""

from samecurve.seam import TaskEntry
from samecurve_products.pictures.vision.sections import VisionData, VisionModel, engines_of

ENTRY = TaskEntry(
    classes={
        "torch": "samecurve_products.pictures.vision.torch_task:TorchVision",
        "jax": "samecurve_products.pictures.vision.jax_task:JaxVision",
    },
    engine_free="samecurve_products.pictures.vision.task:VisionTask",
    model=VisionModel,
    data=VisionData,
    engines_of=engines_of,
)
