"""Classifiers of sensor windows: activities from accelerometer and gyroscope, and their like."""

from samecurve.tasks import TaskEntry
from samecurve.tasks.timeseries.sections import TimeSeriesData, TimeSeriesModel

ENTRY = TaskEntry(
    classes={"torch": "samecurve.tasks.timeseries.torch_task:TorchTimeSeries"},
    engine_free="samecurve.tasks.timeseries.task:TimeSeriesTask",
    model=TimeSeriesModel,
    data=TimeSeriesData,
)
