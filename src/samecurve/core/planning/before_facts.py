"""What is refused before a task is described: what no model and no data could make right."""

from typing import TYPE_CHECKING

from samecurve.core.config.sections import Config
from samecurve.core.planning.batch import choose_batch
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.compute import (
    check_precision,
    check_threads,
    choose_precision,
)
from samecurve.core.planning.layout import Fit, Layout, choose_layout, choose_strategy
from samecurve.core.planning.machine import Machine, choose_devices
from samecurve.core.planning.optimizer import check_engine_has
from samecurve.core.planning.schedule import check_steps, choose_peak
from samecurve.errors import Refusals

if TYPE_CHECKING:  # imported by runs that ask for the same bits
    from samecurve.core.planning.same_bits import SameBits


def check_before_facts(config: Config, machine: Machine, *, can_measure: bool) -> Layout:
    """Refuse what no model and no data could make right, before either is looked at.

    Returns the layout that the run has if its model fits on one device, and the plan takes no more
    CPU ranks. What stands in the way of bits that nobody asks for is no refusal.

    can_measure: speeds of devices are measured before the run, where the config asks for them

    UserError: what the config asks for cannot be done on this machine; all that is known of it.
    """
    train, refusals = config.train, Refusals()
    layout, same_bits = None, None
    if train.asks_same_bits:
        from samecurve.core.planning.exact import as_asked

        same_bits = as_asked(config, machine, None)
    with refusals.collected():
        layout = _layout_before_facts(config, machine, refusals, same_bits=same_bits)
    refusals.collect(check_steps, train.steps)
    refusals.collect(check_engine_has, config.optimizer, config.engine)
    for row in config.named_features:
        refusals.collect(row.load().check, config, layout)
        if not can_measure:
            refusals.collect(row.load().check_unmeasured, config, layout)
    if same_bits:
        features = [row.load() for row in config.named_features]
        refusals.collect(same_bits.check_features, features)
    refusals.raise_any()
    assert layout is not None, "else it was refused"
    return layout


def _layout_before_facts(
    config: Config, machine: Machine, refusals: Refusals, *, same_bits: "SameBits | None"
) -> Layout:
    """The layout, with what follows from it. refusals: takes those that don't hinder each other."""
    engine, train = config.engine, config.train
    devices = choose_devices(config.devices, engine, machine).value
    precision = choose_precision(train, engine, devices).value
    strategy = choose_strategy(
        config.devices, engine, devices, fits=lambda _spec, _shards: Fit(True)
    )
    layout = choose_layout(
        config.devices,
        strategy,
        devices,
        machine,
        syncs_norms=False,
        fixed_microbatches=same_bits is not None,
    ).value
    with refusals.collected():
        if same_bits is None:
            split = choose_batch(config.batch, None, Capacity(), layout.num_devices).value
        else:
            refusals.collect(same_bits.check_layout, layout)
            split = same_bits.split(layout.num_devices, layout.interleaved).value
        size = split.global_batch_size
        choose_peak(config.schedule, config.optimizer.lr, config.batch, size)
    refusals.collect(check_threads, config.devices, layout)
    refusals.collect(check_precision, precision, layout)
    return layout
