"""Configs of Oxidizr: YAML with `model:` and `trainer:`.

There, batch_size is per device, and a step takes batch_size x gradient_accumulation x devices
samples, as with our batch.per_device and accumulate. The optimizer is AdamW with fixed betas and
weight decay, the learning rate constant, the gradient clipped at 1.
"""

from samecurve.convert.foreign_fields import ConvertedConfig, ForeignConfig, Table, epochs
from samecurve.convert.oxidizr_models import (
    convert_library_model,
    is_beyond_language,
)
from samecurve.core.config.document import Document

TOOL = "Oxidizr"
_OURS = {"task", "engine", "batch", "optimizer", "schedule", "train", "devices"}
_SAME = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "kv_heads",
    "intermediate_size",
    "vocab_size",
    "max_seq_len",
    "rope_theta",
)
_DTYPES: Table = {
    name: short
    for short, names in {
        "f32": ("F32", "FP32", "FLOAT32"),
        "f16": ("F16", "FP16", "FLOAT16"),
        "bf16": ("BF16", "BFLOAT16"),
    }.items()
    for name in names
}
_SYNC: Table = {
    "CPU": "cpu",
    "CPU_STAGING": "cpu",
    "CPUSTAGING": "cpu",
    "NCCL": "nccl",
    "SINGLE": "auto",
}
_TRAINER = {
    "learning_rate": "optimizer.lr",
    "batch_size": "batch.per_device",
    "gradient_accumulation": "batch.accumulate",
    "log_interval": "train.log_every",
    "save_interval": "train.save_every",
}
_OTHER_FIELDS = (  # of the trainer that are read
    "max_steps",
    "num_epochs",
    "max_checkpoints",
    "checkpoint_dir",
    "load_balance_alpha",
    "target_device",
)


def matches(document: Document) -> bool:
    """By its shape: a section `trainer`, and none of ours but `model`."""
    return isinstance(document.value.get("trainer"), dict) and not _OURS & document.value.keys()


def convert(document: Document) -> ConvertedConfig:
    foreign = ForeignConfig(document, ("model", "trainer", "trainer.distributed"))
    foreign.document.set("task", "language", "a config of Oxidizr")
    foreign.document.set("model", {}, "a config of Oxidizr")
    foreign.convert("data", "data")
    if is_beyond_language(foreign):
        _names_and_dtype(foreign)
        convert_library_model(foreign)
    else:
        _model(foreign)
    _length(foreign)
    for name, key in _TRAINER.items():
        why = "per device, there and here" if name == "batch_size" else ""
        foreign.convert(f"trainer.{name}", key, why=why)
    _devices(foreign)
    _checkpoints(foreign)
    foreign.ignore("trainer.load_balance_alpha", "balances experts; there are none")
    for name in ("group_size", "beta_kl"):
        foreign.ignore(f"trainer.{name}", "of a training method that nothing there used either")
    _defaults(foreign)
    foreign.refuse_unknown(tuple(f"trainer.{name}" for name in (*_TRAINER, *_OTHER_FIELDS)))
    return foreign.finish(TOOL)


def _checkpoints(foreign: ForeignConfig) -> None:
    """How many are kept, and where."""
    foreign.convert("trainer.max_checkpoints", "train.keep")
    if foreign.value("trainer.max_checkpoints") is None:
        foreign.add_default("train.keep", 10, "ten checkpoints kept")
    home = foreign.value("trainer.checkpoint_dir")
    if isinstance(home, str) and home:
        foreign.run_directory = home
        foreign.ignore(
            "trainer.checkpoint_dir", "the run directory, unless --save-dir names another"
        )


def _defaults(foreign: ForeignConfig) -> None:
    """What no field there sets."""
    foreign.add_default("optimizer.betas", [0.9, 0.999], "AdamW's betas")
    foreign.add_default(
        "optimizer.weight_decay", 0.01, "AdamW's weight decay (here on matrices only)"
    )
    foreign.add_default("optimizer.clip", 1.0, "gradients clipped at 1")
    foreign.add_default("schedule.decay", "constant", "one learning rate for the whole run")


def _model(foreign: ForeignConfig) -> None:
    """Our names pass; a part that is switched off needs nothing.

    The rest is refused by our config, which says what serves it.
    """
    _names_and_dtype(foreign)
    for field in foreign.open_fields("model."):
        name = field.removeprefix("model.")
        if name not in _SAME and not foreign.value(field):
            foreign.ignore(field, "switched off")
        else:
            foreign.convert(field, field)


def _names_and_dtype(foreign: ForeignConfig) -> None:
    foreign.ignore("model.name", "a run is named by its file, or by --save-dir")
    foreign.convert_by_table("model.dtype", "train.precision", _DTYPES, "--dtype f32, f16 or bf16")


def _length(foreign: ForeignConfig) -> None:
    """max_steps, or where it is 0 num_epochs."""
    steps, count = foreign.value("trainer.max_steps", 0), foreign.value("trainer.num_epochs")
    if not _is_zero(steps):
        foreign.convert("trainer.max_steps", "train.steps")
        foreign.ignore(
            "trainer.num_epochs",
            "max_steps says how long the run is (there it ended after so many epochs, if that was"
            " sooner)",
        )
    elif count is None:
        foreign.refuse(
            "trainer.max_steps",
            "means whole epochs, and num_epochs does not say how many",
            "--epochs N",
            "train.steps",
        )
        foreign.ignore("trainer.num_epochs", "as if it were not there")
    else:
        foreign.ignore("trainer.max_steps", "whole epochs, as many as num_epochs says")
        foreign.convert("trainer.num_epochs", "train.steps", epochs(count))


def _devices(foreign: ForeignConfig) -> None:
    why = ""
    if foreign.value("trainer.target_device") == "gpu":
        why = "all that are visible; --gpus 0 for one"
    foreign.convert_by_table(
        "trainer.target_device",
        "devices.use",
        {"GPU": "auto", "CPU": "cpu"},
        "--devices cpu, or --gpus 0,1",
        why,
    )
    section = "trainer.distributed."
    if foreign.value(f"{section}enabled") is True:
        foreign.ignore(f"{section}enabled", "several devices are several devices")
        ids = foreign.value(f"{section}gpu_ids")
        if isinstance(ids, list) and ids:
            foreign.convert(f"{section}gpu_ids", "devices.use", ",".join(map(str, ids)))
        foreign.ignore(f"{section}gpu_ids", "all that are visible")
        foreign.convert_by_table(
            f"{section}backend", "devices.sync", _SYNC, "--sync-backend cpu or nccl"
        )
        return
    for field in foreign.open_fields(section):
        foreign.ignore(field, "switched off")


def _is_zero(value: object) -> bool:
    return value == 0 and not isinstance(value, bool)
