"""Uneven devices: slots are dealt by the devices' speeds, so that none is waited for.

Sums are exact, so the deal changes no result.
"""

from collections.abc import Sequence
from dataclasses import replace

from samecurve.core.config.sections import Config
from samecurve.core.determinism.microbatches import microbatches_of
from samecurve.core.planning.facts import Facts, Speed, Speeds
from samecurve.core.planning.strategies import Layout
from samecurve.errors import UserError
from samecurve.units import first_and_count, join_words, show_seconds

# of a step: of the slots whose deal is predicted to come so close to the best one the largest are
# taken
_CLOSE = 0.03
_LAUNCH = (
    0.02  # of an even share: what a slot is taken to cost by itself where speeds are given by hand
)
_WORTH = 0.05  # of a step: what was measured is no more certain than that


def with_even_balance(config: Config) -> Config:
    """The config for other devices, or for a trial: each takes as much as the others."""
    return config.model_copy(
        update={"devices": config.devices.model_copy(update={"balance": "even"})}
    )


def choose_speeds(config: Config, facts: Facts, layout: Layout) -> Speeds | None:
    """What to deal by; None: all alike.

    UserError: this layout can't deal unevenly, or nobody knows how.
    """
    asked, world = config.devices.balance, len(layout.devices)
    if asked == "even":
        return None
    why = _impossible(config, facts, layout)
    if why:
        raise UserError(f"devices.balance: {why[0]}", why[1], "devices.balance")
    if not isinstance(asked, str):
        if len(asked) != world:
            raise UserError(
                f"devices.balance gives {len(asked)} speed{'s' if len(asked) > 1 else ''} for"
                f" {world} devices",
                "one for each, in their order",
                "devices.balance",
            )
        return Speeds(devices=tuple(Speed(0.0, 1 / speed) for speed in asked))
    if facts.speeds is None:
        raise UserError(
            "devices.balance measured: ranks that others started (torchrun, Slurm, --nnodes) can't"
            " be measured before they train",
            f"relative speeds by hand, one for each of the {world} devices: --balance"
            f" 2,1{',...' if world > 2 else ''}",
            "devices.balance",
        )
    return facts.speeds if facts.speeds.devices else None


def _impossible(config: Config, facts: Facts, layout: Layout) -> tuple[str, str] | None:
    """(Why the devices of this layout must take as much as each other, what can be done)."""
    alike = "--balance even"
    if config.engine == "jax":
        return (
            "engine jax runs one program for all devices, with as many slots for each",
            f"{alike}, or --engine torch",
        )
    if len(layout.devices) == 1:
        return "one device takes all slots there are", f"{alike}, or more devices"
    if layout.shards > 1:
        return (
            (
                f"strategy {layout.strategy} gathers weights in each round, in which all devices"
                " take part, so a slow one would still be waited for"
            ),
            f"{alike}, or --strategy ddp",
        )
    if facts.coupled and (config.train.norm_sync or not config.train.allow_coupled):
        return (
            (
                f"{first_and_count(facts.coupled)} mixes the samples of a slot, and smaller slots would change"
                " the result"
            ),
            f"{alike}, or a norm that treats each sample by itself (GroupNorm, LayerNorm)",
        )
    if config.batch.samples and config.batch.accumulate:
        return (
            "batch.accumulate cuts a step evenly",
            "leave batch.accumulate out; batch.per_device is the most that a device takes at once",
        )
    return None


def microbatch_seconds(speeds: Speeds, micro: int) -> tuple[float, ...]:
    """What a slot takes each device."""
    return tuple(
        device.seconds_per_microbatch + micro * device.seconds_per_sample
        for device in speeds.devices
    )


def predict_step_seconds(
    speeds: Speeds, batch: int, micro: int, times: Sequence[float] = ()
) -> float:
    """Seconds of a step (by hand: in the unit of the speeds) whose slots are dealt by these times;
    none: evenly.
    """
    count, world = -(-batch // micro), len(speeds.devices)
    takes = []
    for place, device in enumerate(speeds.devices):
        mine = microbatches_of(count, place, world, times)
        samples = min(mine.stop * micro, batch) - mine.start * micro if mine else 0
        takes.append(
            len(mine) * device.seconds_per_microbatch + samples * device.seconds_per_sample
        )
    return max(takes) + speeds.rest


def largest_close_to_best(speeds: Speeds, batch: int, most: int) -> int:
    """The largest slot, up to `most`, whose deal is close to the best one."""
    sizes = sorted(
        {-(-batch // count) for count in range(-(-batch // most), batch + 1)}, reverse=True
    )
    found = {
        size: predict_step_seconds(speeds, batch, size, microbatch_seconds(speeds, size))
        for size in sizes
    }
    least = min(found.values())
    return next(size for size, takes in found.items() if takes <= least * (1 + _CLOSE))


def choose_uneven_split(
    speeds: Speeds, batch: int, micro: int, cuts: bool, because: dict[str, str], warnings: list[str]
) -> tuple[int, tuple[float, ...]]:
    """(samples of a slot, what a slot takes each device: empty where an even deal is as good).

    micro: what even devices would take at once. cuts: whether slots may be smaller.
    """
    if not speeds.origin:
        speeds = replace(
            speeds,
            devices=tuple(
                replace(device, seconds_per_microbatch=_LAUNCH * micro * device.seconds_per_sample)
                for device in speeds.devices
            ),
        )
    size = largest_close_to_best(speeds, batch, micro) if cuts else micro
    times = microbatch_seconds(speeds, size)
    before, after = (
        predict_step_seconds(speeds, batch, micro),
        predict_step_seconds(speeds, batch, size, times),
    )
    if after >= before * (1 - (_WORTH if speeds.origin else 0)):
        less = (
            f"another deal is predicted to save less than {_WORTH:.0%} of a step"
            if speeds.origin
            else "no other deal is quicker"
        )
        because["balance"] = f"{_origin(speeds, micro)}; {less}"
        return micro, ()
    count = -(-batch // size)
    shares = [len(microbatches_of(count, place, len(times), times)) for place in range(len(times))]
    gain = (
        f"a step is predicted to take {show_seconds(after)} instead of {show_seconds(before)}"
        if speeds.origin
        else (
            f"forward and backward are predicted to take {after / before:.2f} of what they take"
            " dealt evenly"
        )
    )
    because["balance"] = f"{_origin(speeds, size)}; {gain}"
    if size < micro:
        because["micro"] = (
            f"small enough to deal: within {_CLOSE:.0%} of the best step that is predicted"
        )
    warnings += [
        f"device {place} gets no slot: the others have done all {count} of a step before it would"
        " have done one"
        for place, mine in enumerate(shares)
        if not mine
    ]
    return size, times


def _origin(speeds: Speeds, micro: int) -> str:
    if not speeds.origin:
        return f"devices.balance {' to '.join(f'{1 / device.seconds_per_sample:g}' for device in speeds.devices)}"
    return (
        f"{join_words([f'{micro / time:.3g}' for time in microbatch_seconds(speeds, micro)])} samples/s"
        f" {speeds.origin}"
    )
