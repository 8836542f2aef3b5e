"""Classifiers of sensor windows: activities from accelerometer and gyroscope, and their like."""

from samecurve.seam import TaskEntry
from samecurve_products.sensors.sections import TimeSeriesData, TimeSeriesModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve_products.sensors.torch_task:TorchTimeSeries"},
    engine_free="samecurve_products.sensors.task:TimeSeriesTask",
    model=TimeSeriesModel,
    data=TimeSeriesData,
)
