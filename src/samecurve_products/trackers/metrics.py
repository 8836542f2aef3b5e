"""Names and numbers of an event that trackers plot, the same for every tracker."""

from samecurve.seam import Event

_GROUPS = {"step": "train", "evaluated": "eval", "tested": "test", "sensors": "sensors"}


def plotted(event: Event) -> dict[str, float]:
    """Numbers by name, such as 'train/loss': 2.31, 'sensors/utilisation/0': 0.97.

    Numbers that are unknown or not finite are left out, and so are arrays of an evaluation, such as
    a confusion matrix.
    """
    group = _GROUPS.get(event.kind)
    numbers: dict[str, float] = {}
    if group is None:
        return numbers
    for name, value in event.values.items():
        if isinstance(value, list) and event.kind not in {"evaluated", "tested"}:
            short = name.removesuffix("_by_device")
            for device, of_device in enumerate(value):
                if _is_number(of_device):
                    numbers[f"{group}/{short}/{device}"] = of_device
        elif name == "metrics":  # a step's
            numbers |= {f"{group}/{key}": mean for key, mean in value.items() if _is_number(mean)}
        elif _is_number(value):
            numbers[f"{group}/{name}"] = value
    return numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
