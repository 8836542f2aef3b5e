"""What a plan does so that its run has the same bits on any devices (exact.py decides when).

Microbatches have one size on any devices, sums go along the step's tree, kernels give the same bits
each time, and a device computes with the same threads on any devices. What would make bits follow
the devices is refused.

The number of threads inside an operation changes the order in which a CPU adds, so it never follows
from the ranks. One thread is the default; more ranks use more cores, and change no bit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from samecurve.core.config.sections import Config, Optimizer
from samecurve.core.feature_list import listed_optimizers, spec_of
from samecurve.core.planning import Decision, DecisionLog
from samecurve.core.planning.batch import BatchSplit, check_count
from samecurve.core.planning.compute import choose_threads
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.machine import (
    MOST_CPU_RANKS,
    Device,
    DevicesDecision,
    Machine,
    choose_devices,
    has_open_ranks,
)
from samecurve.core.planning.memory import (
    AnyFeature,
    MemoryOptions,
    MemoryTerm,
    sample_bytes,
)
from samecurve.core.planning.optimizer import not_elementwise
from samecurve.core.planning.tree_memory import gathered_wide, tree_sums
from samecurve.errors import NotSameBitsError
from samecurve.units import counted, first_and_count


@dataclass(frozen=True)
class SameBits:
    """The part of a plan that makes its run's bits the same on any devices."""

    config: Config
    machine: Machine
    fixed: Fixed | None  # what the run's first plan fixed; None: this is the first plan
    most_devices: int  # that can share a step
    is_auto: bool = False  # the plan chose it: batch.per_device was not meant as its microbatch
    why: str = ""  # the plan chose it

    def devices(
        self, holds: Callable[[tuple[Device, ...]], bool], *, was_tried: bool
    ) -> DevicesDecision:
        """The config's devices; where it leaves them open, a CPU rank for each core that has a
        microbatch.

        holds: whether so many ranks have room for the run
        was_tried: one rank has tried how many samples fit
        """
        config, machine = self.config, self.machine
        chosen = choose_devices(config.devices, config.engine, machine)
        follows_devices = self.fixed is None and not config.batch.samples  # the batch does
        is_open = has_open_ranks(config, machine)
        if not is_open or follows_devices or was_tried:
            return chosen
        num_microbatches = self.split(1).value.num_microbatches
        most = min(machine.cores // self._threads().value, num_microbatches, MOST_CPU_RANKS)
        fitting = (count for count in range(most, 1, -1) if holds(machine.ranks_on_cpu(count)))
        count = next(fitting, 1)
        if count == 1:
            return chosen
        rounds = -(-num_microbatches // count)
        why = "one for each core that has a microbatch" if count == most else "as many as fit"
        if (fewest := -(-num_microbatches // rounds)) < count:
            count, why = fewest, f"the fewest with {counted(rounds, 'round')} a step"
        reason = f"no GPU found; {counted(count, 'CPU rank')}, {why} (--devices cpu: a single one)"
        return Decision(machine.ranks_on_cpu(count), {"devices": reason})

    def check_layout(self, layout: Layout) -> None:
        """NotSameBitsError: on these devices the bits would be others than on one device."""
        if "tree" not in layout.spec.reducers and layout.num_devices > 1:
            how = f"strategy {layout.strategy}"
            if self.config.devices.strategy == "auto":
                how += ", taken because the model does not fit on one device,"
            raise NotSameBitsError(
                f"{how} can't add along the step's tree (reducers of its row in"
                " core/strategies.py)",
                "--strategy ddp (dp with engine jax)",
                "devices.strategy",
            )
        names = {device.name for device in layout.devices}
        if len(names) > 1:
            raise NotSameBitsError(
                f"{' and '.join(sorted(names))} compute with different kernels",
                "--gpus with devices of one kind",
                "devices.use",
            )

    def check_features(self, features: Iterable[AnyFeature]) -> None:
        """NotSameBitsError: a feature makes bits follow the devices."""
        for feature in features:
            if why := feature.not_same_bits(self.config):
                raise NotSameBitsError(why, f"leave {feature.key} out", feature.key)

    def check_model(self, facts: Facts, layout: Layout) -> None:
        """NotSameBitsError: the model keeps statistics that follow the device, or the loss calls
        operations that these devices can't repeat bit by bit.
        """
        norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
        if norms:
            raise NotSameBitsError(
                f"the running statistics of {first_and_count(norms)} follow the device",
                "a norm that treats each sample by itself (GroupNorm, LayerNorm)",
                "model",
            )
        if facts.repeats.nondeterministic and layout.devices[0].kind == "cuda":
            from samecurve.core.nondeterministic import refusal

            raise refusal(facts.repeats.nondeterministic)

    def check_optimizer(self, facts: Facts, layout: Layout) -> None:
        """NotSameBitsError: this optimizer's arithmetic follows the shards of a parameter."""
        section, own = self.config.optimizer, facts.updates.user_optimizer
        if own is not None and not own.elementwise:
            why = "train.exact asks for arithmetic that is the same number by number"
            raise NotSameBitsError(*not_elementwise(own, why), "task")
        cause = why_not_sharded(section, facts) if layout.shards > 1 else ""
        if cause:
            others = [name for name in listed_optimizers() if not spec_of(name).why_not_sharded]
            raise NotSameBitsError(
                f"under {layout.strategy}: {cause}",
                f"optimizer.name adamw, sgd, {' or '.join(others)}; --strategy ddp",
                "task" if own else "optimizer.name",
            )

    def split(self, num_devices: int, interleaved: int = 1) -> Decision[BatchSplit]:
        """The batch, whose microbatches have one size on any devices.

        interleaved: devices that share a copy of the model

        UserError: the config cuts a step by the number of devices, or into too many parts.
        """
        section, fixed = self.config.batch, self.fixed
        if section.samples and section.accumulate:
            raise NotSameBitsError(
                "batch.accumulate cuts a step by the number of devices",
                "batch.per_device: the samples of a microbatch, on any devices",
                "batch.accumulate",
            )
        if fixed and fixed.global_batch_size:
            global_batch_size, why_batch = fixed.global_batch_size, "kept from the run's start"
        elif section.samples:
            global_batch_size, why_batch = section.samples, "batch.samples, whatever the devices"
        else:
            global_batch_size = (section.per_device or 0) * (section.accumulate or 1) * num_devices
            why_batch = "as given per device: it grows with the devices"
        if fixed:
            micro, why_micro = fixed.micro_batch_size, "kept from the run's start (train.exact)"
        else:
            micro, why_micro = self._microbatch(global_batch_size)
        split = BatchSplit(
            global_batch_size=global_batch_size,
            micro_batch_size=micro,
            num_devices=num_devices,
            interleaved=interleaved,
        )
        if self.is_auto and fixed is None and num_devices > split.num_microbatches:
            raise NotSameBitsError(
                f"{num_devices} devices share a step of"
                f" {counted(split.num_microbatches, 'microbatch')}",
                f"train.exact_devices={num_devices}",
                "train.exact_devices",
            )
        check_count(split)
        return Decision(split, {"batch": why_batch, "micro": why_micro, **self.reasons(split)})

    def _microbatch(self, global_batch_size: int) -> tuple[int, str]:
        """The samples of a microbatch, and why as many."""
        per_device, most_devices = self.config.batch.per_device, self.most_devices
        share = -(-global_batch_size // most_devices)
        why = (
            f"the batch over {most_devices} devices, whatever their number (train.exact_devices);"
            " batch.per_device gives another size"
        )
        if per_device and self.is_auto:
            return min(per_device, share), f"{why} at most"
        if per_device:
            return min(per_device, global_batch_size), "batch.per_device"
        return share, why

    def reasons(self, split: BatchSplit) -> dict[str, str]:
        """How a step is computed, for the plan."""
        how = (
            f"{counted(split.num_microbatches, 'microbatch')} of {split.micro_batch_size} a step,"
            " each computed by itself and added along one tree; the order of devices changes no bit"
        )
        if split.interleaved > 1:
            how += f"; in each round {split.interleaved} devices take neighbouring ones"
        return {"exact": how}

    def memory(
        self,
        options: MemoryOptions,
        facts: Facts,
        layout: Layout,
        split: BatchSplit,
        capacity: int | None = None,
    ) -> list[MemoryTerm]:
        """The memory of the sums of a step's microbatches, and of weights that are gathered wide.

        capacity: samples that fit without them; None: not known

        NotSameBitsError: no microbatch fits beside them.
        """
        terms = [MemoryTerm("exact", *tree_sums(options, facts, layout, split))]
        if wider := gathered_wide(options, facts, layout):
            terms.append(wider)
        if capacity is not None:
            if each := sample_bytes(options, facts):
                capacity -= -(-sum(term.bytes for term in terms) // each)
            self._check_fits(split.micro_batch_size, capacity)
        return terms

    def _check_fits(self, micro: int, capacity: int) -> None:
        """NotSameBitsError: no microbatch fits. capacity: samples that do"""
        if capacity < 1:
            raise NotSameBitsError(
                "the sums that train.exact holds beside the gradients leave no room for a sample",
                "a smaller model",
            )
        if micro <= capacity:
            return
        fitting = micro
        while fitting > capacity:  # halved, so that the devices share them out as before
            fitting = -(-fitting // 2)
        smaller = f"batch.per_device={fitting}"
        remedy = (
            f"--set {smaller}: microbatches of that size wherever this is to give the same bits"
        )
        if self.fixed is not None:
            remedy = (
                "fewer ranks on this machine, or a device with more memory: this run's microbatches"
                f" are of {micro}"
            )
        raise NotSameBitsError(
            f"a microbatch of {micro} samples does not fit: {capacity} do",
            remedy,
            "batch.per_device",
            instead=f"{smaller} makes it fit",
        )

    def threads(self, layout: Layout) -> Decision[int]:
        """Threads inside one device's operations, the same on any number of CPU ranks."""
        if layout.engine == "torch" and layout.devices[0].kind == "cpu":
            return self._threads()
        return choose_threads(self.config.devices, layout, self.machine)

    def _threads(self) -> Decision[int]:
        asked, machine, fixed = self.config.devices.threads, self.machine, self.fixed
        wanted = asked or machine.threads
        if fixed is not None:
            warnings: tuple[str, ...] = ()
            if wanted and wanted != fixed.threads:
                by = "devices.threads" if asked else "OMP_NUM_THREADS"
                warning = (
                    f"{by} {wanted}: this run began with {counted(fixed.threads, 'thread')} a rank,"
                    " and train.exact keeps them"
                )
                warnings = (warning,)
            return Decision(fixed.threads, {"threads": "kept from the run's start"}, warnings)
        if asked:
            return Decision(asked, {"threads": "devices.threads"})
        if machine.threads:
            reason = "OMP_NUM_THREADS; another number gives other bits (devices.threads wins)"
            return Decision(machine.threads, {"threads": reason})
        reason = "1 in an operation on any number of ranks, so that all add in the same order"
        return Decision(1, {"threads": reason})

    def say(self, log: DecisionLog, layout: Layout, split: BatchSplit, threads: int) -> None:
        """Log on how many devices the bits are the same, and what would use idle cores."""
        idle = self._idle_cores(layout, split, threads)
        if not self.is_auto:
            log.reasons["threads"] += f"; {idle}" if idle else ""
            return
        count, places = split.num_microbatches, split.accumulation_steps * split.num_devices
        words = f"the same bits on up to {counted(count, 'device')}"
        if self.why:
            words += f", {self.why}"
        if places > count:
            words += f"; {1 - count / places:.0%} of a step the devices idle: {count} microbatches"
            words += f" in {counted(split.accumulation_steps, 'round')}"
        log.reasons["exact_auto"] = f"{words}; {idle}" if idle else words

    def _idle_cores(self, layout: Layout, split: BatchSplit, threads: int) -> str:
        """The flag with which CPU ranks would use more cores; '': they use all, or the user
        counted the threads.
        """
        section, cores, hosts = self.config.devices, self.machine.cores, self.machine.hosts
        on_host = layout.num_devices // hosts
        busy = on_host * threads
        on_cpu = layout.devices[0].kind == "cpu" and layout.engine == "torch"
        if not on_cpu or busy >= cores or section.threads:
            return ""
        most = min(cores // threads, -(-split.num_microbatches // hosts))
        if section.use.strip() != "auto" and most > on_host:
            used = "all cores" if most * threads == cores else f"{most * threads} of {cores} cores"
            return f"--devices cpu:{most} uses {used}"
        return f"{busy} of {counted(cores, 'core')} compute; --no-exact uses all"


def why_not_sharded(section: Optimizer, facts: Facts) -> str:
    """Why shards can't be updated with the same bits by this optimizer; empty: they can."""
    own = facts.updates.user_optimizer
    if own is not None:
        return (
            f"{own.name} of {own.by} would update parts of arrays, and torch's kernels may round"
            " the ends of a part in another way than the same numbers of a whole array"
        )
    spec = spec_of(section.name)
    return spec.why_not_sharded if spec else ""
