"""Configs of LLaMA-Factory: flat YAML with `model_name_or_path`, a stage and how it trains.

A batch is per_device_train_batch_size x gradient_accumulation_steps x devices, as here. Data sets
are names in a file of that tool, and templates its own, so both are for a flag to say.
"""

from collections.abc import Mapping

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
from samecurve.convert.llamafactory_fields import REFUSED, UNNEEDED
from samecurve.core.config.document import Document

TOOL = "LLaMA-Factory"
# of a quantized base: what is served, by field
_BITSANDBYTES: Mapping[str, tuple[object, ...]] = {
    "quantization_method": ("bnb", "bitsandbytes"),
    "quantization_type": ("nf4",),
    "double_quantization": (True, False),
}
_SHAPE = {"stage", "finetuning_type", "template", "cutoff_len", "dataset"}
_SAME_NAMES = {
    "per_device_train_batch_size": "batch.per_device",
    "gradient_accumulation_steps": "batch.accumulate",
    "cutoff_len": "data.seq_len",
    "seed": "train.seed",
    "logging_steps": "train.log_every",
    "save_total_limit": "train.keep",
    "dataloader_num_workers": "data.workers",
    "torch_compile": "train.compile",
}
_DEFAULTS = {  # field -> key, value, what it is there
    "per_device_train_batch_size": ("batch.per_device", 8, "eight samples at once"),
    "gradient_accumulation_steps": ("batch.accumulate", 1, "no accumulation"),
    "cutoff_len": ("data.seq_len", 2048, "2048 tokens"),
    "save_steps": ("train.save_every", 500, "a checkpoint every 500 steps"),
}
_ATTENTION: Table = {
    "AUTO": "auto",
    "DISABLED": "eager",
    "SDPA": "sdpa",
    "FA2": "flash",
    "FA3": "flash",
}
_HOW = (
    "-d FILE: rows of `messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"
    " (docs/huggingface-data.md)"
)


def matches(document: Document) -> bool:
    """By its shape: `model_name_or_path` beside its own words, and no section of ours."""
    keys = document.value.keys()
    ours = {"task", "model", "train"} & keys
    return "model_name_or_path" in keys and bool(_SHAPE & keys) and not ours


def convert(document: Document) -> ConvertedConfig:
    foreign = ForeignConfig(document, ())
    foreign.document.set("task", "huggingface", "a config of LLaMA-Factory")
    why = "a directory of this machine: nothing is downloaded"
    foreign.convert("model_name_or_path", "model.path", why=why)
    _method(foreign)
    _data(foreign)
    for field, key in _SAME_NAMES.items():
        foreign.convert(field, key)
    convert_length(foreign, "num_train_epochs", 3.0)
    convert_warmup(foreign)
    convert_optimizer(foreign, "optim", 5e-5)
    convert_decay(foreign, "lr_scheduler_type", "linear")
    convert_precision(foreign)
    _memory(foreign)
    _when(foreign)
    for field, (key, value, what) in _DEFAULTS.items():
        if foreign.value(field) is None and not _is_there(foreign, key):
            foreign.add_default(key, value, what)
    refuse_switched_on(foreign, REFUSED)
    ignore_all(foreign, UNNEEDED)
    foreign.refuse_unknown((*_SAME_NAMES, *_DEFAULTS, *REFUSED, "dataset", "template", "lora_rank"))
    return foreign.finish(TOOL)


def _is_there(foreign: ForeignConfig, key: str) -> bool:
    return bool(foreign.document.origin_of(tuple(key.split("."))))


def _method(foreign: ForeignConfig) -> None:
    """What is learnt, and by which of the weights."""
    if foreign.value("stage", "sft") in {"sft", "pt"}:
        foreign.ignore("stage", "the next token, in what the data lets count")
    foreign.refuse(
        "stage", "is another objective than the next token", "task: FILE.py:CLASS, one of your own"
    )
    kind = foreign.value("finetuning_type", "lora")
    if kind == "full":
        foreign.ignore("finetuning_type", "all weights are trained")
        for field in foreign.open_fields("lora_"):
            foreign.ignore(field, "no adapter is trained")
    elif kind != "lora":
        foreign.refuse("finetuning_type", "is not served", "finetuning_type: full, or lora")
    else:
        _lora(foreign)
    bits = foreign.value("quantization_bit")
    if bits in {4, 8}:
        foreign.convert("quantization_bit", "model.quantize", f"{bits}bit")
    foreign.refuse("quantization_bit", "is not served", "4, 8, or none")
    for field, served in _BITSANDBYTES.items():
        if foreign.value(field) in served:
            foreign.ignore(field, "by bitsandbytes, nf4 where it is 4 bits, scales kept whole")
        foreign.refuse(field, "is not served", "bnb, nf4")


def _lora(foreign: ForeignConfig) -> None:
    name = "dora" if foreign.value("use_dora") is True else "lora"
    if foreign.value("finetuning_type") is None:
        foreign.add_default("model.adapter.kind", name, "finetuning_type lora")
    foreign.convert("finetuning_type", "model.adapter.kind", name)
    foreign.ignore("use_dora", "see finetuning_type")
    rank = foreign.value("lora_rank", 8)
    foreign.convert("lora_rank", "model.adapter.rank")
    if foreign.value("lora_rank") is None:
        foreign.add_default("model.adapter.rank", 8, "rank 8")
    convert_number(foreign, "lora_alpha", "model.adapter.alpha")
    if foreign.value("lora_alpha") is None and isinstance(rank, int):
        foreign.add_default("model.adapter.alpha", 2.0 * rank, "alpha twice the rank")
    convert_number(foreign, "lora_dropout", "model.adapter.dropout")
    target = foreign.value("lora_target", "all")
    if target == "all":
        foreign.convert("lora_target", "model.adapter.target", "all-linear")
    elif isinstance(target, str):
        names = [name.strip() for name in target.split(",")]
        foreign.convert("lora_target", "model.adapter.target", names)


def _data(foreign: ForeignConfig) -> None:
    foreign.refuse("dataset", "names entries of that tool's dataset_info.json", _HOW, "data.source")
    foreign.leave("data.source", str(foreign.value("dataset", "")))
    foreign.ignore("dataset_dir", "where those names are looked up")
    foreign.refuse(
        "template",
        "is a template that LLaMA-Factory brings; here it is the tokenizer's own, or a file",
        "--set data.chat_template=FILE.jinja, or =null for the tokenizer's own",
        "data.chat_template",
    )
    packs = foreign.value("packing", foreign.value("stage") == "pt")
    if foreign.value("neat_packing") is True:
        foreign.convert("neat_packing", "data.packing", True)
        foreign.ignore("packing", "see neat_packing")
    elif packs is True and foreign.value("packing") is True:
        foreign.refuse(
            "packing",
            "lets documents of a row see each other; here they are apart, as with neat_packing",
            "--set data.packing=true, or false",
            "data.packing",
        )
    else:
        foreign.ignore("packing", "switched off")
        foreign.ignore("neat_packing", "switched off")
        foreign.add_default("data.packing", packs is True, "as this stage packs")
    convert_held_out(foreign, "val_size")


def _memory(foreign: ForeignConfig) -> None:
    """Attention, recomputing, and how the model lies on devices: none of it changes a curve."""
    foreign.convert_by_table("flash_attn", "model.attention", _ATTENTION, "auto, sdpa or fa2")
    if foreign.value("disable_gradient_checkpointing") is True:
        foreign.ignore("disable_gradient_checkpointing", "nothing is recomputed")
    else:
        foreign.ignore("disable_gradient_checkpointing", "switched off")
        foreign.add_default("train.recompute", "block", "gradient checkpointing")
    foreign.ignore("gradient_checkpointing", "see disable_gradient_checkpointing, which decides")
    convert_deepspeed(foreign)
    if foreign.value("fsdp"):
        foreign.convert("fsdp", "devices.strategy", "fsdp")
        foreign.ignore("fsdp_config", "each of the library's blocks is a shard of its own here")


def _when(foreign: ForeignConfig) -> None:
    """Evaluations, checkpoints, and who is told."""
    if foreign.value("eval_strategy") is None and foreign.value("evaluation_strategy"):
        word = str(foreign.value("evaluation_strategy")).lower()
        if word == "steps":
            foreign.ignore("evaluation_strategy", "eval_steps says how often")
        else:
            every = {"epoch": "1ep", "no": 0}.get(word, word)
            foreign.convert("evaluation_strategy", "train.eval_every", every)
            foreign.ignore("eval_steps", "evaluation_strategy says when")
    convert_intervals(foreign, "eval", "train.eval_every")
    convert_intervals(foreign, "save", "train.save_every")
    home = foreign.value("output_dir")
    if isinstance(home, str) and home:
        foreign.run_directory = home
        foreign.ignore("output_dir", "the run directory, unless --save-dir names another")
    reports = foreign.value("report_to", "none")
    names = reports if isinstance(reports, list) else [reports]
    if "wandb" in names or "all" in names:
        foreign.convert("report_to", "track.wandb", "online")
    elif "tensorboard" in names:
        foreign.convert("report_to", "track.tensorboard", True)
    elif set(names) <= {"none"}:
        foreign.ignore("report_to", "the journal is always written")
    foreign.refuse("report_to", "is not served", "wandb, tensorboard or none")
