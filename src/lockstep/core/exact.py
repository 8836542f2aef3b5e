"""What train.exact takes: slots of one size whatever the devices, and nothing whose bits depend on these; the rest is refused by name."""

from lockstep.core.config import Config
from lockstep.core.dealing import slots
from lockstep.core.facts import Facts, Fixed
from lockstep.core.place import Layout
from lockstep.errors import UserError
from lockstep.units import some

_SLOTS = 8  # of a step, where nothing else is asked for: work for 1, 2, 4 and 8 devices


def check_exact(config: Config, facts: Facts, layout: Layout) -> None:
    """UserError: something that gives other bits on other devices."""
    if layout.shards > 1:
        how = f"strategy {layout.strategy}" + (", taken because the model does not fit on one device," if config.devices.strategy == "auto" else "")
        raise UserError(f"train.exact: {how} cuts weights by the number of devices, and with them the vectors that the optimizer and the norm work on, whose ends are computed otherwise",
                        "--strategy ddp (dp with engine jax), or leave --exact out", "devices.strategy")
    if config.devices.compress != "none":
        raise UserError(f"train.exact: compress {config.devices.compress} rounds what each device sends", "leave --compress out", "devices.compress")
    names = {device.name for device in layout.devices}
    if len(names) > 1:
        raise UserError(f"train.exact: {' and '.join(sorted(names))} compute with different kernels", "--gpus with devices of one kind", "devices.use")
    if facts.unkeyed:
        raise UserError(f"train.exact: {some(facts.unkeyed)} draws its dropout by device", "nn.Dropout, whose masks follow the sample, or p = 0", "model")
    norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
    if norms:
        raise UserError(f"train.exact: the running statistics of {some(norms)} follow the device", "a norm that treats each sample by itself (GroupNorm, LayerNorm), or leave --exact out", "model")


def exact_batch(config: Config, world: int, cap: int | None, fixed: Fixed | None, because: dict[str, str]) -> tuple[int, int, int]:
    """(samples of a step, samples of a slot, slots of a device). The slot's size never follows from the devices. cap: samples that fit in flight."""
    given = config.batch
    if given.samples and given.accumulate:
        raise UserError("train.exact: batch.accumulate cuts a step by the number of devices", "batch.per_device: the samples of a slot, on any devices", "batch.accumulate")
    batch = (fixed.batch if fixed else None) or given.samples or (given.per_device or 0) * (given.accumulate or 1) * world
    because["batch"] = "as this run began" if fixed and fixed.batch else "batch.samples, whatever the devices" if given.samples else "as given per device: it grows with the devices"
    if fixed:
        micro, because["micro"] = fixed.slot, "as this run began (train.exact)"
    elif given.per_device:
        micro, because["micro"] = min(given.per_device, batch), "batch.per_device"
    else:
        micro, because["micro"] = -(-batch // _SLOTS), f"a {_SLOTS}th of the batch, whatever the devices (train.exact); batch.per_device gives another slot"
    if cap is not None and micro > cap:
        remedy = f"fewer ranks on this machine, or a device with more memory: this run's slots are of {micro}" if fixed else f"--set batch.per_device={cap}: slots of that size wherever this is to give the same bits"
        raise UserError(f"a slot of {micro} samples does not fit: {cap} do", remedy, "batch.per_device")
    count = len(slots(batch, micro))
    because["exact"] = f"{count} slots of {micro} a step, computed one by one and added along one tree; the order of devices changes no bit"
    return batch, micro, -(-count // world)
