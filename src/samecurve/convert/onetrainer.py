"""Configs of OneTrainer and of its forks with several GPUs.

JSON with `multi_gpu` or `enable_multi_gpu`. How it trains is read; what it trains, a diffusion
model, belongs to a task of that name. The batch is per device, an epoch passes over all data, steps
of warm-up and of saving count batches, of which gradient_accumulation_steps make one optimizer
step.
"""

from samecurve.convert.foreign_fields import ConvertedConfig, ForeignConfig, Table, epochs
from samecurve.convert.onetrainer_fields import DIFFUSION_FIELDS, UNNEEDED_FIELDS
from samecurve.core.config.document import Document

TOOL = "OneTrainer"
_DTYPES: Table = {"FLOAT_32": "f32", "BFLOAT_16": "bf16", "FLOAT_16": "f16"}
_DECAYS: Table = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"}
_RECOMPUTE: Table = {
    "ON": "block",
    "OFF": "none",
    "CPU_OFFLOADED": "block",
    True: "block",
    False: "none",
}
_PLAIN = {
    "batch_size": "batch.per_device",
    "gradient_accumulation_steps": "batch.accumulate",
    "learning_rate_min_factor": "schedule.final",
    "seed": "train.seed",
}
_OPTIMIZER = {
    "weight_decay": "optimizer.weight_decay",
    "eps": "optimizer.eps",
    "momentum": "optimizer.momentum",
}
_OTHER_FORMULAS = {"adafactor", "muon"}  # optimizers that share no more than the name with ours
# of an optimizer: would change what it does, if on
_CHANGED = ("amsgrad", "nesterov", "maximize", "dampening", "cautious", "fused_back_pass")

_DEFAULTS = {  # field -> our key, its value, and what it is there
    "epochs": ("train.steps", "100ep", "100 epochs"),
    "batch_size": ("batch.per_device", 1, "one sample at once"),
    "learning_rate": ("optimizer.lr", 3e-6, "its default rate"),
    "learning_rate_scheduler": ("schedule.decay", "constant", "no decay"),
    "learning_rate_min_factor": ("schedule.final", 0.0, "a decay ends at nothing"),
    "learning_rate_warmup_steps": ("schedule.warmup", 200, "200 batches of warm-up"),
    "train_dtype": ("train.precision", "f16", "half precision"),
    "optimizer.beta2": ("optimizer.betas", [0.9, 0.999], "AdamW's betas"),
    "optimizer.weight_decay": (
        "optimizer.weight_decay",
        0.01,
        "AdamW's weight decay (here on matrices only)",
    ),
}


def matches(document: Document) -> bool:
    """By its shape: its switch for several GPUs, or its two words for what is trained.

    And none of our sections.
    """
    keys = document.value.keys()
    has_switch = bool({"multi_gpu", "enable_multi_gpu"} & keys)
    says_what_is_trained = {"training_method", "model_type"} <= keys
    return (has_switch or says_what_is_trained) and not {"task", "batch", "train"} & keys


def convert(document: Document) -> ConvertedConfig:
    foreign = ForeignConfig(document, ("optimizer", "distributed"))
    for section in ("model", "data"):
        foreign.document.set(section, {}, "a config of OneTrainer")
    foreign.document.set("task", "diffusion", "a config of OneTrainer")
    foreign.convert("model_type", "task", "diffusion", "its model, data and samples")
    for name, key in _PLAIN.items():
        why = "per device, there and here" if name == "batch_size" else ""
        foreign.convert(name, key, why=why)
    _devices(foreign)
    _processes(foreign)
    _rate(foreign)
    _warmup(foreign)
    _length(foreign)
    _optimizer(foreign)
    _computing(foreign)
    _unsupported(foreign)
    _defaults(foreign)
    _remaining(foreign)
    foreign.refuse_unknown(
        (
            *_PLAIN,
            "learning_rate",
            "epochs",
            "train_dtype",
            "enable_multi_gpu",
            "multi_gpu",
            "distributed_backend",
        )
    )
    return foreign.finish(TOOL)


def _computing(foreign: ForeignConfig) -> None:
    foreign.convert_by_table("train_dtype", "train.precision", _DTYPES, "--dtype f32, bf16 or f16")
    foreign.convert_by_table(
        "gradient_checkpointing", "train.recompute", _RECOMPUTE, "--set train.recompute=block"
    )
    if foreign.value("compile"):
        foreign.convert("compile", "train.compile")


def _unsupported(foreign: ForeignConfig) -> None:
    """What this program has not: refused where it is on."""
    if str(foreign.value("ema", "OFF")).upper() != "OFF":
        foreign.refuse(
            "ema",
            "keeps an average of the weights, which this version does not",
            "take it out of the file to train without",
        )
    for field, none in (
        ("loss_scaler", "NONE"),
        ("scheduler_params", []),
        ("custom_learning_rate_scheduler", ""),
    ):
        if foreign.value(field, none) != none:
            foreign.refuse(
                field,
                "has no counterpart: a loss here is a sum divided by how much was counted, a"
                " schedule one of constant, linear, cosine, wsd",
                "take it out of the file to train without",
            )
    for field in (
        "compile",
        "ema",
        "ema_decay",
        "ema_update_step_interval",
        "loss_scaler",
        "scheduler_params",
        "custom_learning_rate_scheduler",
    ):
        foreign.ignore(field, "switched off, or part of what is")


def _defaults(foreign: ForeignConfig) -> None:
    """Of what is not in the file."""
    rounds = foreign.value("gradient_accumulation_steps", 1)
    for field, (key, default, why) in _DEFAULTS.items():
        if foreign.value(field) is None and not foreign.document.origin_of(tuple(key.split("."))):
            value = _steps(default, rounds) if key == "schedule.warmup" else default
            foreign.add_default(key, value, why)


def _devices(foreign: ForeignConfig) -> None:
    """The switch for several GPUs, its upstream form and its forks', and which there are."""
    switches = ("enable_multi_gpu", "multi_gpu", "distributed.enabled")
    present = [switch for switch in switches if foreign.value(switch) is not None]
    if present:
        _convert_switch(foreign, present[0])
    else:
        foreign.add_default("devices.strategy", "single", "one device, where no switch says more")
    foreign.ignore("device_indexes", "all that are visible")
    device = foreign.value("train_device", "cuda")
    if isinstance(device, str):
        device = device.lower()
    if device == "cpu":
        foreign.convert("train_device", "devices.use", "cpu")
    elif isinstance(device, str) and device.startswith("cuda"):
        foreign.ignore("train_device", "GPUs are taken where there are any")
    foreign.refuse(
        "train_device", "is no device here", "--devices cpu, or --gpus 0,1", "devices.use"
    )


def _convert_switch(foreign: ForeignConfig, switch: str) -> None:
    """switch: the field that says whether several GPUs are used"""
    chosen = foreign.value("device_indexes")
    if not isinstance(foreign.value(switch), bool):
        foreign.refuse(
            switch,
            "is neither true nor false",
            "--devices all, or cpu, or --gpus 0,1",
            "devices.use",
        )
    elif not foreign.value(switch):
        foreign.convert(switch, "devices.strategy", "single")
        foreign.ignore("device_indexes", "one device: --gpus I says which")
    elif isinstance(chosen, str) and chosen:
        foreign.ignore(switch, "several devices are several devices")
        foreign.convert("device_indexes", "devices.use", chosen)
    else:
        foreign.convert(switch, "devices.use", "all")


def _processes(foreign: ForeignConfig) -> None:
    """How the devices' processes are started, and how they meet."""
    for name in ("distributed_backend", "backend", "distributed.backend"):
        foreign.convert_by_table(
            name, "devices.sync", {"NCCL": "nccl", "GLOO": "gloo"}, "--sync-backend nccl or gloo"
        )
    for name in ("use_torchrun", "distributed.use_torchrun"):
        foreign.convert_by_table(
            name,
            "devices.launcher",
            {True: "elastic", False: "spawn"},
            "--launcher elastic or spawn",
        )
    for name in ("distributed_data_loading", "distributed_data"):
        foreign.ignore(name, "always so: each rank reads only its own samples")
    foreign.convert("distributed.master_port", "devices.port")
    for field in foreign.open_fields("distributed."):
        foreign.ignore(field, "found out, or right by itself")


def _rate(foreign: ForeignConfig) -> None:
    """learning_rate, its decay, and its scaling by devices (linear, in a fork) or by batch."""
    foreign.convert_by_table(
        "learning_rate_scheduler",
        "schedule.decay",
        _DECAYS,
        "--set schedule.decay=cosine, or linear, constant, wsd",
    )
    for name in ("learning_rate_scaling", "scale_learning_rate"):
        foreign.convert_by_table(
            name,
            "schedule.scale_lr",
            {True: "linear", False: "none"},
            "--scale-lr none, linear or sqrt",
            "against one device's share of a step",
        )
    _scale_by_batch(foreign)
    foreign.convert("learning_rate", "optimizer.lr")
    foreign.ignore("learning_rate_cycles", "for schedules that restart")


def _scale_by_batch(foreign: ForeignConfig) -> None:
    """learning_rate_scaler, upstream's: by the square root of a number of samples."""
    rounds = foreign.value("gradient_accumulation_steps", 1)
    each = foreign.value("batch_size", 1)
    rate = foreign.value("learning_rate")
    factors = {"BATCH": each, "GRADIENT_ACCUMULATION": rounds, "BOTH": _times(each, rounds)}
    scaler = str(foreign.value("learning_rate_scaler", "NONE")).upper()
    factor = factors.get(scaler)
    if isinstance(factor, int) and isinstance(rate, int | float):
        foreign.convert(
            "learning_rate",
            "optimizer.lr",
            rate * factor**0.5,
            f"x the root of {factor}, as learning_rate_scaler says",
        )
        foreign.ignore("learning_rate_scaler", "done: the learning rate is scaled already")
    elif scaler in {"GLOBAL_BATCH", "GLOBAL_BOTH"}:
        base = rounds if scaler == "GLOBAL_BATCH" else 1
        foreign.document.set("schedule.base_batch", base, "as learning_rate_scaler says")
        foreign.convert(
            "learning_rate_scaler", "schedule.scale_lr", "sqrt", f"against a batch of {base}"
        )
    foreign.convert_by_table(
        "learning_rate_scaler",
        "schedule.scale_lr",
        {"NONE": "none"},
        "--scale-lr none, linear or sqrt",
    )


def _warmup(foreign: ForeignConfig) -> None:
    """A share of the run, or batches."""
    rounds = foreign.value("gradient_accumulation_steps", 1)
    warmup, length = foreign.value("learning_rate_warmup_steps"), foreign.value("epochs", 100)
    if isinstance(warmup, int | float) and 0 < warmup <= 1 and isinstance(length, int | float):
        foreign.convert(
            "learning_rate_warmup_steps",
            "schedule.warmup",
            epochs(warmup * length),
            f"that share of {length} epochs",
        )
    foreign.convert(
        "learning_rate_warmup_steps", "schedule.warmup", _steps(warmup, rounds), _by(rounds)
    )


def _length(foreign: ForeignConfig) -> None:
    foreign.convert("epochs", "train.steps", epochs(foreign.value("epochs")))
    rounds = foreign.value("gradient_accumulation_steps", 1)
    for name, unit, key in (
        ("backup_after", "backup_after_unit", "train.save_every"),
        ("validate_after", "validate_after_unit", "train.eval_every"),
    ):
        every, kind = foreign.value(name), str(foreign.value(unit, "EPOCH")).upper()
        if name == "validate_after" and not foreign.value("validation"):
            foreign.ignore(name, "validation is off")
        elif kind == "STEP":
            foreign.convert(name, key, _steps(every, rounds), _by(rounds))
        elif kind == "EPOCH":
            foreign.convert(name, key, epochs(every))
        foreign.ignore(
            name,
            "by the clock, or never: a run saves at its end and when it is stopped; --set"
            f" {key}=500 for more",
        )
        foreign.ignore(unit, f"read with {name}")
    foreign.ignore("validation", "a run evaluates wherever its task has held-out data")
    if foreign.value("rolling_backup"):
        foreign.convert("rolling_backup_count", "train.keep")
    foreign.ignore("rolling_backup_count", "rolling_backup is off")
    foreign.ignore("rolling_backup", "read with rolling_backup_count")
    home = foreign.value("workspace_dir")
    if isinstance(home, str) and home:
        foreign.run_directory = home
        foreign.ignore("workspace_dir", "the run directory, unless --save-dir names another")


def _optimizer(foreign: ForeignConfig) -> None:
    """Upstream's section, or an older file's single word.

    Which optimizers there are is for our config to say.
    """
    foreign.convert("clip_grad_norm", "optimizer.clip")
    for name in ("optimizer.optimizer", "optimizer"):
        if str(foreign.value(name)).lower() in _OTHER_FORMULAS:
            foreign.refuse(
                name,
                "is not computed there as it is here, so the curve would be another",
                "ADAMW or SGD; or a config of ours with optimizer.name, as docs/optimizers.md says",
            )
        foreign.convert(name, "optimizer.name", str(foreign.value(name)).lower())
    for prefix in ("optimizer.", "optimizer_"):
        betas = [foreign.value(f"{prefix}beta1", 0.9), foreign.value(f"{prefix}beta2", 0.999)]
        for name in ("beta1", "beta2"):
            foreign.convert(prefix + name, "optimizer.betas", betas)
        for name, key in _OPTIMIZER.items():
            foreign.convert(prefix + name, key)
        for name in _CHANGED:
            if foreign.value(prefix + name):
                foreign.refuse(
                    prefix + name,
                    "changes the optimizer in a way that this program does not have",
                    "take it out of the file to train without",
                )
        for field in foreign.open_fields(prefix):
            if field != "optimizer_defaults":
                foreign.ignore(field, "of other optimizers, or their speed")


def _remaining(foreign: ForeignConfig) -> None:
    for why, names in UNNEEDED_FIELDS.items():
        beginnings = tuple(name for name in names if name.endswith("_"))
        for field in foreign.open_fields():
            if field in names or field.startswith(beginnings):
                foreign.ignore(field, why)
    for field in foreign.open_fields():
        if field.startswith(DIFFUSION_FIELDS):
            foreign.ignore(
                field,
                "for task diffusion to read; a user task has its own `model:` and `data:`",
            )


def _steps(count: object, rounds: object) -> object:
    """Batches -> optimizer steps; what is no number stays, and is refused by our config."""
    if isinstance(count, bool) or not isinstance(count, int | float):
        return count
    if not isinstance(rounds, int) or rounds <= 0:
        return count
    return int(count // rounds)


def _by(rounds: object) -> str:
    if rounds == 1:
        return ""
    return f"batches / gradient_accumulation_steps {rounds}"


def _times(first: object, second: object) -> int | None:
    """None: one of them is no number."""
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    return None
