"""Configs over transformers' Trainer: axolotl's and LLaMA-Factory's, field by field."""

import math
from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from samecurve.core.config.document import dump_document, parse_document
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Order
from samecurve.core.planning import Decision
from samecurve.core.planning.schedule import Schedule, choose_schedule
from samecurve.tasks import Tasks
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import convert

AXOLOTL: dict[str, Any] = {
    "base_model": "models/little-llama",
    "model_type": "LlamaForCausalLM",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "strict": False,
    "datasets": [
        {"path": "talks.jsonl", "type": "chat_template", "field_messages": "messages"},
        {"path": "json", "ds_type": "json", "data_files": ["a.jsonl", "b.jsonl"]},
    ],
    "dataset_prepared_path": "prepared",
    "val_set_size": 0.05,
    "output_dir": "./out/lora",
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "sequence_len": 4096,
    "sample_packing": True,
    "pad_to_sequence_len": True,
    "wandb_project": "talks",
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-5",
    "train_on_inputs": False,
    "group_by_length": False,
    "bf16": "auto",
    "fp16": None,
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "flash_attention": True,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {"fsdp_offload_params": True, "fsdp_state_dict_type": "FULL_STATE_DICT"},
    "special_tokens": {"pad_token": "<pad>"},
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "models/little-qwen",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,v_proj",
    "deepspeed": "deepspeed/ds_z3_config.json",
    "dataset": "talks,letters",
    "template": "qwen",
    "cutoff_len": 1024,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/qwen",
    "logging_steps": 10,
    "save_steps": 250,
    "plot_loss": True,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}


def read(fields: dict[str, Any], **others: Any) -> ConvertedConfig:
    values = {name: value for name, value in {**fields, **others}.items() if value != "(gone)"}
    converted = convert(parse_document(dump_document(values), "old.yaml"))
    assert converted is not None
    outcomes = [reading.field for reading in converted.readings if reading.place != "-"]
    assert len(outcomes) == len(set(outcomes))
    flat = set(values) - {"fsdp_config", "special_tokens"}
    assert flat <= set(outcomes)  # none is passed over
    return converted


def loaded(converted: ConvertedConfig, **settings: Any) -> LoadedConfig:
    """settings: as flags would."""
    for key, value in settings.items():
        converted.document.set(key.replace("__", "."), value, f"--set {key}")
    assert converted.unresolved(converted.document) == []
    return load_document(converted.document, Tasks())


def values_of(config: LoadedConfig, *keys: str) -> dict[str, Any]:
    result = {}
    for key in keys:
        value: Any = config.config
        for part in key.split("."):
            value = getattr(value, part)
        result[key] = value
    return result


def test_a_config_of_axolotl() -> None:
    """qlora on conversations, under FSDP: batch 2 x 4 a device, four epochs."""
    converted = read(AXOLOTL)
    assert (converted.tool, converted.run_directory) == ("axolotl", "./out/lora")
    becomes = {
        "task": "huggingface",
        "model.path": "models/little-llama",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 32,
        "model.adapter.alpha": 16.0,
        "model.adapter.dropout": 0.05,
        "model.adapter.target": "all-linear",
        "model.quantize": "4bit",
        "model.attention": "flash",
        "data.source": ["talks.jsonl", "a.jsonl", "b.jsonl"],
        "data.seq_len": 4096,
        "data.too_long": "drop",
        "data.packing": True,
        "data.validation": 0.05,
        "batch.per_device": 2,
        "batch.accumulate": 4,
        "optimizer.name": "adamw8bit",
        "optimizer.lr": 2e-5,
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": (0.9, 0.999),
        "optimizer.clip": 1.0,
        "schedule.decay": "cosine",
        "schedule.final": 0.0,
        "schedule.form": "transformers",
        "schedule.warmup": "0.4ep",
        "train.steps": "4ep",
        "train.precision": "bf16",
        "train.recompute": "block",
        "train.eval_every": "0.25ep",
        "train.save_every": "1ep",
        "devices.strategy": "fsdp",
        "devices.offload": True,
        "track.wandb": "online",
        "track.wandb_project": "talks",
    }
    assert values_of(loaded(converted), *becomes) == becomes
    assert "wandb_project: talks" in converted.to_yaml("old.yaml")


def test_a_config_of_llama_factory() -> None:
    """Its data sets and its template are names of that tool: flags say them."""
    converted = read(FACTORY)
    assert [refusal.key for refusal in converted.refusals] == ["data.source", "data.chat_template"]
    becomes = {
        "model.path": "models/little-qwen",
        "model.adapter.kind": "lora",
        "model.adapter.rank": 4,
        "model.adapter.alpha": 8.0,
        "model.adapter.target": ["q_proj", "v_proj"],
        "data.seq_len": 1024,
        "data.too_long": "cut",
        "data.packing": False,
        "data.validation": 0.1,
        "batch.per_device": 1,
        "batch.accumulate": 8,
        "optimizer.lr": 1e-4,
        "optimizer.weight_decay": 0.0,
        "schedule.warmup": "0.3ep",
        "schedule.final": 0.0,
        "schedule.form": "transformers",
        "train.steps": "3ep",
        "train.precision": "bf16",
        "train.recompute": "block",
        "train.save_every": 250,
        "train.eval_every": 500,
        "devices.strategy": "fsdp",
    }
    settled = loaded(converted, data__source="talks.jsonl", data__chat_template=None)
    assert values_of(settled, *becomes) == becomes


@pytest.mark.parametrize(
    ("change", "becomes"),
    [
        ({"adapter": None}, {"model.adapter": None, "model.quantize": "4bit"}),
        ({"load_in_4bit": "(gone)"}, {"model.quantize": "4bit"}),
        ({"max_steps": 500}, {"train.steps": 500, "schedule.warmup": 50}),
        ({"max_steps": 55}, {"schedule.warmup": 5}),
        ({"max_steps": 15}, {"schedule.warmup": 2}),
        ({"warmup_steps": 20}, {"schedule.warmup": 20}),
        ({"warmup_steps": 1}, {"schedule.warmup": 2}),
        ({"lr_scheduler": "constant_with_warmup"}, {"schedule.decay": "constant"}),
        ({"lr_scheduler": "constant"}, {"schedule.decay": "constant", "schedule.warmup": 0}),
        ({"cosine_min_lr_ratio": 0.2}, {"schedule.final": 0.2}),
        ({"cosine_min_lr_ratio": 0.2, "lr_scheduler": "linear"}, {"schedule.final": 0.0}),
        ({"excess_length_strategy": "drop"}, {"data.too_long": "drop"}),
        ({"excess_length_strategy": "truncate"}, {"data.too_long": "cut"}),
        ({"excess_length_strategy": "raise"}, {"data.too_long": "refuse"}),
        ({"bf16": False, "fp16": True}, {"train.precision": "f16"}),
        ({"sequence_len": "(gone)"}, {"data.seq_len": 512}),
        ({"sample_packing": "(gone)"}, {"data.packing": False}),
        ({"saves_per_epoch": None, "save_steps": 70}, {"train.save_every": 70}),
        ({"adam_beta2": 0.95}, {"optimizer.betas": (0.9, 0.95)}),
        ({"deepspeed": "zero3_bf16.json", "fsdp": None}, {"devices.strategy": "fsdp"}),
        ({"fsdp": None, "fsdp_config": None}, {"devices.strategy": "auto"}),
    ],
)
def test_a_field_of_axolotl(change: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert values_of(loaded(read(AXOLOTL, **change)), *becomes) == becomes


@pytest.mark.parametrize(
    ("change", "becomes"),
    [
        ({"finetuning_type": "full"}, {"model.adapter": None}),
        ({"finetuning_type": "(gone)", "use_dora": True}, {"model.adapter.kind": "dora"}),
        ({"lora_target": "all"}, {"model.adapter.target": "all-linear"}),
        ({"quantization_bit": 4}, {"model.quantize": "4bit"}),
        ({"quantization_bit": 8, "double_quantization": True}, {"model.quantize": "8bit"}),
        ({"neat_packing": True}, {"data.packing": True}),
        ({"stage": "pt"}, {"data.packing": True}),
        ({"warmup_ratio": None, "warmup_steps": 0.1}, {"schedule.warmup": "0.3ep"}),
        ({"lr_scheduler_type": "(gone)"}, {"schedule.decay": "linear"}),
        ({"save_steps": "(gone)"}, {"train.save_every": 500}),
        ({"save_strategy": "no"}, {"train.save_every": 0}),
        ({"eval_strategy": "(gone)", "evaluation_strategy": "epoch"}, {"train.eval_every": "1ep"}),
        ({"per_device_train_batch_size": "(gone)"}, {"batch.per_device": 8}),
        ({"flash_attn": "fa2"}, {"model.attention": "flash"}),
        ({"disable_gradient_checkpointing": True}, {"train.recompute": "none"}),
        ({"report_to": "wandb"}, {"track.wandb": "online"}),
        ({"report_to": "mlflow"}, {"track.mlflow": True}),
        ({"report_to": ["trackio"]}, {"track.trackio": True}),
    ],
)
def test_a_field_of_llama_factory(change: dict[str, Any], becomes: dict[str, Any]) -> None:
    converted = read(FACTORY, **change)
    settled = loaded(converted, data__source="talks.jsonl", data__chat_template=None)
    assert values_of(settled, *becomes) == becomes


@pytest.mark.parametrize(
    ("fields", "change", "says"),
    [
        (AXOLOTL, {"rl": "dpo"}, "rl dpo is another objective"),
        (AXOLOTL, {"train_on_inputs": True}, "train_on_inputs true learns prompts too"),
        (AXOLOTL, {"optimizer": "adafactor"}, "optimizer adafactor is not one of ADAMW_TORCH"),
        (AXOLOTL, {"lr_scheduler": "rex"}, "lr_scheduler rex is not one of"),
        (AXOLOTL, {"val_set_size": 100}, "val_set_size 100 counts rows"),
        (AXOLOTL, {"chat_template": "llama3"}, "chat_template llama3 is a template that axolotl"),
        (AXOLOTL, {"adapter": "llama-adapter"}, "adapter llama-adapter is no adapter"),
        (AXOLOTL, {"plugins": ["mine.Plugin"]}, "may do anything"),
        (AXOLOTL, {"no_such_field": 1}, "no_such_field 1 is a field that this program does not"),
        (
            AXOLOTL,
            {"datasets": [{"path": "a", "type": "alpaca_chat"}]},
            "data set 1: type alpaca_chat is not",
        ),
        (
            AXOLOTL,
            {"datasets": [{"path": "a", "field_messages": "conversations"}]},
            "data set 1: field_messages conversations is not served",
        ),
        (AXOLOTL, {"datasets": [{"path": "a", "shards": 4}]}, "data set 1: shards is not served"),
        (AXOLOTL, {"tf32": True, "bf16": False}, "tf32 true is not served"),
        (FACTORY, {"stage": "dpo"}, "stage dpo is another objective"),
        (FACTORY, {"finetuning_type": "freeze"}, "finetuning_type freeze is not served"),
        (FACTORY, {"packing": True}, "packing true lets documents of a row see each other"),
        (AXOLOTL, {"attn_implementation": "sage"}, "attn_implementation sage is not one of"),
        (
            AXOLOTL,
            {"lora_target_modules": ["q_proj", "lm_head"]},
            "names a layer beside all linear ones",
        ),
        (FACTORY, {"pure_bf16": True}, "pure_bf16 true has weights of two bytes"),
        (FACTORY, {"eval_steps": 0.25}, "eval_steps 0.25 is a share of the run"),
        (FACTORY, {"report_to": "comet_ml"}, "report_to comet_ml is not served"),
    ],
)
def test_what_would_change_the_training_is_refused(
    fields: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    converted = read(fields, **change)
    causes = [refusal.error.cause for refusal in converted.refusals]
    assert any(says in cause for cause in causes), causes
    assert all(refusal.error.remedy for refusal in converted.refusals)


@pytest.mark.parametrize(
    "converted",
    [read(FACTORY), read(AXOLOTL, datasets=[{"path": "a", "type": "alpaca_chat"}])],
    ids=["LLaMA-Factory", "axolotl"],
)
def test_what_is_written_trains_on_no_other_data(converted: ConvertedConfig) -> None:
    """The default, Python's own text, would be taken in silence."""
    again = load_document(parse_document(converted.to_yaml("old.yaml"), "new.yaml"), Tasks())
    sources = {source.source for source in values_of(again, "data.sources")["data.sources"]}
    assert sources in ({"talks,letters"}, {"a"})


@pytest.mark.parametrize("name", ["task", "model", "train"])
@pytest.mark.parametrize("fields", [AXOLOTL, FACTORY])
def test_a_config_of_ours_is_none_of_theirs(fields: dict[str, Any], name: str) -> None:
    assert convert(parse_document(dump_document({**fields, name: {}}), "ours.yaml")) is None


def sections_of(converted: ConvertedConfig) -> dict[str, Any]:
    return dict(converted.document.value)


def test_what_axolotl_s_own_examples_say_is_read() -> None:
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    change = {
        "attn_implementation": "flash_attention_2",
        "flash_attention": None,
        "lora_target_linear": None,
        "lora_target_modules": pattern,
        "eot_tokens": ["<end_of_turn>"],
    }
    converted = read(AXOLOTL, **change)
    assert converted.refusals == ()
    model = sections_of(converted)["model"]
    assert (model["attention"], model["adapter"]["target"]) == ("flash", pattern)
    both = read(AXOLOTL, lora_target_modules=["q_proj"])
    assert both.refusals == ()
    assert sections_of(both)["model"]["adapter"]["target"] == "all-linear"
    shown = {r.field: r.value_text for r in converted.readings}
    assert shown["special_tokens.pad_token"] == "<pad>"
    secret = read(AXOLOTL, hub_token="abc")
    assert next(r for r in secret.readings if r.field == "hub_token").value_text == "(not shown)"


def rates_of_library(name: str, steps: int, warmup: int, **kinds: Any) -> list[float]:
    """The rate of each step of a run under the library's own scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    options = {"num_warmup_steps": warmup, "num_training_steps": steps}
    scheduler = get_scheduler(name, optimizer, **options, scheduler_specific_kwargs=kinds)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def rates_of_plan(config: Config, samples: int = 100) -> Decision[Schedule]:
    order = Order(seed=0, samples=samples, global_batch_size=10)
    return choose_schedule(config.schedule, config.train.steps, config.batch, order, lr=2e-5)


@pytest.mark.parametrize("warmup", [0, 2, 7])
@pytest.mark.parametrize("steps", [1, 8, 23])
@pytest.mark.parametrize(
    ("name", "more", "kinds"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("constant", {}, {}),
        ("constant_with_warmup", {}, {}),
        # axolotl's own cosine with cosine_min_lr_ratio: the library's warm-up, and this decay
        ("cosine", {"cosine_min_lr_ratio": 0.2}, {"min_lr_rate": 0.2}),
    ],
)
def test_a_converted_schedule_has_the_library_s_rates(
    name: str, more: dict[str, Any], kinds: dict[str, Any], steps: int, warmup: int
) -> None:
    """Number by number, also where the warm-up is longer than the run; and the plan says so."""
    length = {"max_steps": steps, "warmup_steps": warmup, "warmup_ratio": None}
    ours = [loaded(read(AXOLOTL, lr_scheduler=name, **length, **more))]
    if not more:
        factory = read(FACTORY, lr_scheduler_type=name, **length, learning_rate=2e-5)
        ours.append(loaded(factory, data__source="a.jsonl", data__chat_template=None))
    theirs = rates_of_library("cosine_with_min_lr" if kinds else name, steps, warmup, **kinds)
    for each in ours:
        schedule = rates_of_plan(each.config)
        rates = [schedule.value.at(step) for step in range(steps)]
        assert rates == pytest.approx(theirs, rel=1e-13, abs=1e-25)
        assert (
            f"schedule.form transformers: {theirs[0]:.3g} in the first step, {theirs[-1]:.3g} in"
            " the last"
        ) in schedule.reasons["lr"]


@pytest.mark.parametrize("share", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("samples", [95, 100, 333])
def test_a_part_of_the_run_is_as_many_steps_of_warm_up_as_the_library_takes(
    share: float, samples: int
) -> None:
    """It rounds the share of all steps up; the tail of an epoch is a whole step there too."""
    lasts = {"num_train_epochs": 3.0, "warmup_ratio": share, "lr_scheduler_type": "linear"}
    settled = loaded(read(FACTORY, **lasts), data__source="a.jsonl", data__chat_template=None)
    schedule = rates_of_plan(settled.config, samples).value
    assert schedule.steps == 3 * math.ceil(samples / 10)
    assert schedule.warmup == math.ceil(share * schedule.steps)


@pytest.mark.parametrize(
    ("change", "warmup"),
    [
        ({"num_epochs": 4}, "0.12ep"),
        ({"max_steps": 1000}, 30),
        ({"max_steps": 9000}, 100),
        ({"max_steps": 40}, 2),
        ({"max_steps": 40, "warmup_steps": 0}, None),
    ],
)
def test_axolotl_s_defaults_are_those_of_a_missing_field(
    change: dict[str, Any], warmup: object
) -> None:
    """A warm-up of 3 % up to 100 steps, a checkpoint and an evaluation each epoch, four kept."""
    absent = {"warmup_ratio": None, "evals_per_epoch": None, "saves_per_epoch": None}
    converted = read(AXOLOTL, **{**absent, **change})
    values = sections_of(converted)
    assert values["schedule"].get("warmup") == warmup
    train = values["train"]
    assert (train["save_every"], train["eval_every"], train["keep"]) == ("1ep", "1ep", 4)
    assert any("weights are held in bf16" in line for line in converted.summary_lines()) is False
    whole = read(AXOLOTL, bf16=True)
    assert any("weights are held in bf16" in line for line in whole.summary_lines())


def test_llama_factory_s_rows_and_samples() -> None:
    converted = read(FACTORY, max_samples=1000, stage="pt", neat_packing=None)
    data = sections_of(converted)["data"]
    assert (data["instructions"], data["max_documents"], data["packing"]) == ("chat", 1000, True)
    assert any("cut out of one stream" in line for line in converted.summary_lines())


def test_a_frozen_base_under_bf16_is_held_in_bf16() -> None:
    here = read(AXOLOTL, adapter="lora", load_in_4bit=False)
    assert sections_of(here)["model"]["quantize"] == "bf16"
    assert sections_of(read(AXOLOTL))["model"]["quantize"] == "4bit"
    there = read(FACTORY, bf16=True, quantization_bit=None)
    assert sections_of(there)["model"]["quantize"] == "bf16"
