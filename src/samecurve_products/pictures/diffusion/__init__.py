"""Models that make pictures: diffusers' pipelines from files, or new models of pixels."""

from samecurve.seam import TaskEntry
from samecurve_products.pictures.diffusion.sections import DiffusionData, DiffusionModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve_products.pictures.diffusion.torch_task:TorchDiffusion"},
    engine_free="samecurve_products.pictures.diffusion.task:DiffusionTask",
    model=DiffusionModel,
    data=DiffusionData,
    libraries=("diffusers.models.modeling_utils",),
)
