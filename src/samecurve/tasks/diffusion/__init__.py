"""Models that make pictures: diffusers' pipelines from files, or new models of pixels."""

from samecurve.tasks import TaskEntry
from samecurve.tasks.diffusion.sections import DiffusionData, DiffusionModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve.tasks.diffusion.torch_task:TorchDiffusion"},
    engine_free="samecurve.tasks.diffusion.task:DiffusionTask",
    model=DiffusionModel,
    data=DiffusionData,
    libraries=("diffusers.models.modeling_utils",),
)
