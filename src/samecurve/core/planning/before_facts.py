"""What is refused before a task is described: what no model and no data could make right."""

from samecurve.core.config.sections import Config
from samecurve.core.planning.capacity import Capacity
from samecurve.core.planning.compute import (
    check_precision,
    check_threads,
    choose_precision,
)
from samecurve.core.planning.layout import Fit, Layout, choose_layout, choose_strategy
from samecurve.core.planning.machine import Machine, choose_devices
from samecurve.core.planning.optimizer import check_engine_has
from samecurve.core.planning.planner import even_split
from samecurve.core.planning.schedule import check_steps, choose_peak
from samecurve.errors import Refusals


def check_before_facts(config: Config, machine: Machine, *, can_measure: bool) -> Layout:
    """Refuse what no model and no data could make right, before either is looked at.

    Returns the layout that the run has if its model fits on one device, and an exact run on CPUs
    takes no more ranks.

    can_measure: speeds of devices are measured before the run, where the config asks for them

    UserError: what the config asks for cannot be done on this machine; all that is known of it.
    """
    if config.train.plan_chooses_exact:  # what would stand in its way is no refusal
        config = config.with_values(train={"exact": False})
    train, refusals = config.train, Refusals()
    layout = None
    with refusals.collected():
        layout = _layout_before_facts(config, machine, refusals)
    refusals.collect(check_steps, train.steps)
    refusals.collect(check_engine_has, config.optimizer, config.engine)
    for row in config.named_features:
        refusals.collect(row.load().check, config, layout)
        if not can_measure:
            refusals.collect(row.load().check_unmeasured, config, layout)
    refusals.raise_any()
    assert layout is not None, "else it was refused"
    return layout


def _layout_before_facts(config: Config, machine: Machine, refusals: Refusals) -> Layout:
    """The layout, with what follows from it. refusals: takes those that don't hinder each other."""
    engine, train = config.engine, config.train
    devices = choose_devices(config.devices, engine, machine).value
    precision = choose_precision(train, engine, devices).value
    strategy = choose_strategy(
        config.devices, engine, devices, fits=lambda _spec, _shards: Fit(True)
    )
    layout = choose_layout(config.devices, train, strategy, devices, machine, norm_sync=False).value
    if train.is_exact:
        from samecurve.core.planning.exact import check_exact_layout

        is_auto = config.devices.strategy == "auto"
        refusals.collect(check_exact_layout, layout, is_auto=is_auto)
    with refusals.collected():
        size = even_split(config, layout, Capacity(), fixed=None).value.global_batch_size
        choose_peak(config.schedule, config.optimizer.lr, config.batch, size)
    refusals.collect(check_threads, config.devices, layout)
    refusals.collect(check_precision, precision, layout)
    return layout
