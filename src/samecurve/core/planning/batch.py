"""How many samples a step has, and how many of them a device takes at once, where devices are
alike.
"""

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Fixed
from samecurve.errors import UserError


def choose_batch(
    config: Config,
    tried: bool,
    world: int,
    cap: int | None,
    fixed: Fixed | None,
    because: dict[str, str],
) -> tuple[int, int]:
    """(samples of a step, samples of a slot).

    tried: the cap was. cap: samples that fit in flight.
    """
    given = config.batch
    kept = fixed.global_batch_size if fixed else None
    if given.samples is None and kept is None and given.per_device is not None:
        micro, rounds = given.per_device, given.accumulate or 1
        if cap is not None and micro > cap:
            again = -(-micro * rounds // cap)
            raise UserError(
                f"{micro} samples at once don't fit: {cap} do",
                f"--batch-size {-(-micro * rounds // again)} --grad-accum {again} keeps the batch"
                f" of {micro * rounds * world}",
                "batch.per_device",
            )
        because["batch"] = "as given per device: it grows with the devices"
        because["micro"] = "batch.per_device"
        return micro * rounds * world, micro
    batch = kept or given.samples or 0
    most = min((rows for rows in (cap, given.per_device) if rows), default=batch)
    rounds = given.accumulate if given.samples and given.accumulate else -(-batch // (world * most))
    micro = -(-batch // (world * rounds))
    if micro > most:
        raise UserError(
            f"{micro} samples at once don't fit: {most} do",
            f"leave batch.accumulate out, or make it at least {-(-batch // (world * most))}",
            "batch.accumulate",
        )
    asked = given.samples or (given.per_device or 0) * (given.accumulate or 1) * world
    because["batch"] = "batch.samples, whatever the devices"
    if kept is not None:
        because["batch"] = "as this run began" + (
            f" (the config's {asked} would need --new-batch)" if asked != kept else ""
        )
    largest = "the largest that fitted when tried" if tried else "the largest that memory allows"
    because["micro"] = (
        largest
        if rounds > 1 and most == cap
        else ("at most batch.per_device" if given.per_device else "a device's whole share")
    )
    return batch, micro
