"""How torchtune trains all weights of a Llama on one device: the parts and the order of its recipe
full_finetune_single_device.py (0.6.1), in bf16 as that recipe's configs have it, weights included.

torchtune 0.6.1 imports with torchao 0.13 at the latest, and peft takes 0.16 at the least: where
either side needs an adapter, the two can't be run beside each other.
"""

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.sides import Clock, Setting


def why_not(*, adapter: bool) -> str | None:
    """Why it is left out; None: it can be run. adapter: whether the case has one"""
    if adapter:
        return "torchtune needs torchao 0.13 at the latest, and our adapter's peft 0.16 or newer"
    try:
        import torchtune.models.llama3_2  # noqa: F401
    except ImportError as error:
        return f"torchtune does not import: {error}"
    return None


def _model(fields: Mapping[str, Any]) -> Any:
    """fields: of the library's LlamaConfig"""
    from torchtune.models.llama3_2 import llama3_2

    sizes = {
        "vocab_size": fields["vocab_size"],
        "num_layers": fields["num_hidden_layers"],
        "num_heads": fields["num_attention_heads"],
        "num_kv_heads": fields["num_key_value_heads"],
        "embed_dim": fields["hidden_size"],
        "intermediate_dim": fields["intermediate_size"],
        "max_seq_len": fields["max_position_embeddings"],
        "norm_eps": fields["rms_norm_eps"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
    }
    return llama3_2(**sizes)


def torchtune(
    setting: Setting,
    *,
    fields: Mapping[str, Any],
    recompute: bool,
    rows: torch.utils.data.Dataset[Any],
) -> None:
    from torchtune import modules, training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    gpu = setting.device.type == "cuda"
    torch.manual_seed(0)
    with training.set_default_dtype(torch.bfloat16), setting.device:
        model = _model(fields)
    training.compile_model(model, verbose=False)
    if recompute:
        policy = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(model, auto_wrap_policy=policy)
    loss_of: Any = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    loss_of = training.compile_loss(loss_of, verbose=False)
    optimizer_fields = setting.config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=optimizer_fields.lr,
        betas=optimizer_fields.betas,
        weight_decay=optimizer_fields.weight_decay,
        fused=True,
    )
    loader: Any = torch.utils.data.DataLoader(
        rows,
        batch_size=setting.plan.batch.micro_batch_size,
        pin_memory=gpu,
        num_workers=2 if gpu else 0,
    )
    clock, rounds = Clock(setting), setting.plan.batch.accumulation_steps
    counted = torch.zeros((), device=setting.device)
    for number, batch in enumerate(loader, 1):
        tokens, labels = (batch[name].to(setting.device) for name in ("input_ids", "labels"))
        in_batch = (labels != loss_of.ignore_index).sum()
        counted += in_batch
        ignored = torch.full_like(labels[:, :1], loss_of.ignore_index)
        loss = loss_of(model(tokens), torch.hstack((labels[:, 1:], ignored))) * in_batch
        loss.backward()
        if number % rounds:
            continue
        training.scale_grads(model, 1 / counted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=optimizer_fields.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counted.zero_()
        clock.tick()
