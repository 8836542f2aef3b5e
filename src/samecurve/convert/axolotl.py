"""Configs of axolotl: flat YAML with `base_model`, its data sets and how it trains.

A batch is micro_batch_size x gradient_accumulation_steps x devices, as here. Models and data sets
are named as a hub names them or by a path; nothing is downloaded here, so they must be paths.
"""

from collections.abc import Mapping

from samecurve.convert.axolotl_fields import REFUSED, UNNEEDED
from samecurve.convert.foreign_fields import ConvertedConfig, ForeignConfig, Table
from samecurve.convert.hf_trainer import (
    convert_decay,
    convert_deepspeed,
    convert_held_out,
    convert_intervals,
    convert_length,
    convert_number,
    convert_optimizer,
    convert_precision,
    convert_warmup,
    ignore_all,
    refuse_switched_on,
)
from samecurve.core.config.document import Document

TOOL = "axolotl"
_SHAPE = {"datasets", "pretraining_dataset", "micro_batch_size", "sequence_len"}
_LOCAL = "a directory or file of this machine: nothing is downloaded"
_SAME_NAMES = {
    "micro_batch_size": "batch.per_device",
    "gradient_accumulation_steps": "batch.accumulate",
    "sequence_len": "data.seq_len",
    "seed": "train.seed",
    "logging_steps": "train.log_every",
    "save_total_limit": "train.keep",
    "dataloader_num_workers": "data.workers",
    "torch_compile": "train.compile",
    "use_tensorboard": "track.tensorboard",
}
_ATTENTION = {  # a switch -> model.attention
    "flash_attention": "flash",
    "sdp_attention": "sdpa",
    "xformers_attention": "sdpa",
    "flex_attention": "flex",
    "eager_attention": "eager",
}
_RECOMPUTE: Table = {True: "block", False: "none", "TRUE": "block", "OFFLOAD": "block"}
# of a data set: what is served, by its value
_SERVED = {
    "split": ("train",),
    "field": ("text",),
    "field_messages": ("messages",),
    "message_field_role": ("role",),
    "message_field_content": ("content",),
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
    "roles": ({"user": ["user"], "assistant": ["assistant"]},),
}
_KERNELS = ("liger", "cut_cross_entropy")
_TYPES = (None, "completion", "chat_template", "alpaca")
_HOW = (
    "rows of `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"
    " (docs/huggingface-data.md); -d FILE"
)


def matches(document: Document) -> bool:
    """By its shape: `base_model` beside its data, and no section of ours."""
    keys = document.value.keys()
    return "base_model" in keys and bool(_SHAPE & keys) and not {"task", "model", "train"} & keys


def convert(document: Document) -> ConvertedConfig:
    sections = ("special_tokens", "fsdp_config")
    foreign = ForeignConfig(document, sections)
    foreign.document.set("task", "huggingface", "a config of axolotl")
    foreign.convert("base_model", "model.path", why=_LOCAL)
    _adapter(foreign)
    _data(foreign)
    for field, key in _SAME_NAMES.items():
        foreign.convert(field, key)
    if foreign.value("gradient_accumulation_steps") is None:
        foreign.add_default("batch.accumulate", 1, "no accumulation")
    if foreign.value("sequence_len") is None:
        foreign.add_default("data.seq_len", 512, "512 tokens")
    convert_length(foreign, "num_epochs", 1.0)
    convert_warmup(foreign)
    convert_optimizer(foreign, "optimizer", None)
    convert_decay(foreign, "lr_scheduler", "cosine")
    convert_precision(foreign)
    _memory(foreign)
    _when(foreign)
    _tracking(foreign)
    _plugins(foreign)
    refuse_switched_on(foreign, REFUSED)
    ignore_all(foreign, UNNEEDED)
    known = (*_SAME_NAMES, *_ATTENTION, *REFUSED, "base_model", "datasets", "adapter", "lora_r")
    foreign.refuse_unknown(known)
    return foreign.finish(TOOL)


def _adapter(foreign: ForeignConfig) -> None:
    """LoRA, and what its base is held in."""
    kind = foreign.value("adapter")
    if kind not in {"lora", "qlora"}:
        if kind:
            foreign.refuse("adapter", "is no adapter of this program", "adapter: lora, or qlora")
        for field in ("adapter", *foreign.open_fields("lora_"), *foreign.open_fields("peft_")):
            foreign.ignore(field, "no adapter is trained")
    else:
        dora = foreign.value("peft_use_dora") is True
        foreign.convert("adapter", "model.adapter.kind", "dora" if dora else "lora")
        foreign.ignore("peft_use_dora", "see adapter")
        foreign.convert("lora_r", "model.adapter.rank")
        convert_number(foreign, "lora_alpha", "model.adapter.alpha")
        convert_number(foreign, "lora_dropout", "model.adapter.dropout")
        if foreign.value("lora_target_linear") is True:
            foreign.convert("lora_target_linear", "model.adapter.target", "all-linear")
            foreign.ignore("lora_target_modules", "all linear layers")
        foreign.ignore("lora_target_linear", "switched off")
        foreign.convert("lora_target_modules", "model.adapter.target")
    bits = "none"
    for field, value in (("load_in_8bit", "8bit"), ("load_in_4bit", "4bit")):
        if foreign.value(field) is True:
            bits = value
            foreign.convert(field, "model.quantize", value)
        foreign.ignore(field, "switched off")
    if kind == "qlora" and bits == "none":
        foreign.add_default("model.quantize", "4bit", "qlora's base")


def _data(foreign: ForeignConfig) -> None:
    sets = foreign.value("datasets", [])
    sources: list[object] = []
    fault = "" if sets and isinstance(sets, list) else "is no list of data sets"
    for number, one in enumerate(sets if isinstance(sets, list) else ()):
        fault = fault or _fault_of(one, number)
        if isinstance(one, dict):
            files = one.get("data_files") or one.get("path")
            sources += files if isinstance(files, list) else [files]
    if fault:
        foreign.refuse("datasets", fault, _HOW, "data.source")
        foreign.leave("data.source", [str(source) for source in sources] or "")
    else:
        foreign.convert("datasets", "data.source", sources, _LOCAL)
    _template(foreign)
    foreign.convert("sample_packing", "data.packing")
    if foreign.value("sample_packing") is None:
        foreign.add_default("data.packing", False, "a row for each sample")
    convert_held_out(foreign, "val_set_size")
    foreign.convert("tokenizer_config", "data.tokenizer", why=_LOCAL)


def _fault_of(one: object, number: int) -> str:
    """Why a data set is not served; '' if it is."""
    where = f"data set {number + 1}: "
    if not isinstance(one, Mapping):
        return f"{where}is no mapping"
    if one.get("type") not in _TYPES:
        return f"{where}type {one.get('type')} is not served"
    for name, value in one.items():
        if name in {"path", "data_files", "ds_type", "type"} or value is None:
            continue
        if name not in _SERVED:
            return f"{where}{name} is not served"
        if value not in _SERVED[name]:
            return f"{where}{name} {value} is not served"
    return ""


def _template(foreign: ForeignConfig) -> None:
    """A template is the tokenizer's own, or a file's."""
    jinja = foreign.value("chat_template_jinja")
    if isinstance(jinja, str) and jinja.endswith(".jinja"):
        foreign.convert("chat_template_jinja", "data.chat_template")
        foreign.ignore("chat_template", "chat_template_jinja is there, and wins")
    if foreign.value("chat_template") == "tokenizer_default":
        foreign.ignore("chat_template", "the tokenizer's own, as here")
    for field in ("chat_template", "chat_template_jinja"):
        if foreign.value(field) is None:
            foreign.ignore(field, "the tokenizer's own")
        foreign.refuse(
            field,
            "is a template that axolotl brings; here it is the tokenizer's own, or a file",
            "--set data.chat_template=FILE.jinja, or =null for the tokenizer's own",
            "data.chat_template",
        )


def _memory(foreign: ForeignConfig) -> None:
    """Attention, recomputing, and how the model lies on devices: none of it changes a curve."""
    word = foreign.value("attention")
    names = {"flash": "flash", "sdpa": "sdpa", "flex": "flex", "eager": "eager"}
    if word in names:
        foreign.convert("attention", "model.attention", names[str(word)])
    for field, name in _ATTENTION.items():
        if foreign.value(field) is True:
            foreign.convert(field, "model.attention", name)
        foreign.ignore(field, "switched off")
    foreign.convert_by_table(
        "gradient_checkpointing", "train.recompute", _RECOMPUTE, "true or false"
    )
    convert_deepspeed(foreign)
    kinds = foreign.value("fsdp")
    words = kinds if isinstance(kinds, list) else str(kinds or "").split()
    if words or foreign.value("fsdp_version"):
        field = "fsdp" if words else "fsdp_version"
        foreign.convert(field, "devices.strategy", "fsdp")
        if "shard_grad_op" in words:
            foreign.add_default("devices.reshard", False, "shard_grad_op")
        if "offload" in words:
            foreign.add_default("devices.offload", True, "offload")
    foreign.ignore("fsdp", "switched off")
    foreign.ignore("fsdp_version", "PyTorch's second, here")
    for name in ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params"):
        foreign.convert(name, "devices.offload")
    for name in (
        "fsdp_config.fsdp_reshard_after_forward",
        "fsdp_config.reshard_after_forward",
    ):
        foreign.convert(name, "devices.reshard")
    for field in foreign.open_fields("fsdp_config"):
        foreign.ignore(field, "each of the library's blocks is a shard of its own here")


def _when(foreign: ForeignConfig) -> None:
    """Evaluations and checkpoints, by steps or by parts of an epoch."""
    for field, kind, key in (
        ("evals_per_epoch", "eval", "train.eval_every"),
        ("saves_per_epoch", "save", "train.save_every"),
    ):
        times = foreign.value(field)
        if isinstance(times, int) and times > 0:
            foreign.convert(field, key, f"{1 / times:.9f}".rstrip("0").rstrip(".") + "ep")
            foreign.ignore(f"{kind}_steps", f"{field} says when")
        foreign.ignore(field, "never")
        convert_intervals(foreign, kind, key)
    home = foreign.value("output_dir")
    if isinstance(home, str) and home:
        foreign.run_directory = home
        foreign.ignore("output_dir", "the run directory, unless --save-dir names another")


def _plugins(foreign: ForeignConfig) -> None:
    """Kernels change no curve; what others do is not known."""
    names = foreign.value("plugins", [])
    if isinstance(names, list) and all(
        any(part in str(name) for part in _KERNELS) for name in names
    ):
        foreign.ignore("plugins", "the same function, by other kernels")
    foreign.refuse("plugins", "may do anything", "only Liger's and cut_cross_entropy's")


def _tracking(foreign: ForeignConfig) -> None:
    project = foreign.value("wandb_project")
    mode = foreign.value("wandb_mode")
    if project:
        foreign.convert("wandb_project", "track.wandb_project")
        how = mode if mode in {"offline", "online"} else "online"
        foreign.add_default("track.wandb", how, "wandb_project")
    for field in foreign.open_fields("wandb_"):
        foreign.ignore(field, "what W&B is told is the run's name and its figures")
