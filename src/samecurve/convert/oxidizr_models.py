"""Models of Oxidizr that task language has not, as the library model that is nearest.

Latent attention is deepseek_v3's; a mixture of experts is mixtral's, with a shared expert
granitemoeshared's; Mamba-2 layers alone are mamba2's, beside attention bamba's, and with experts
granitemoehybrid's. Fields that such a model lacks are left by name, with what is built instead.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from samecurve.convert.foreign_fields import ForeignConfig

_EPSILON = 1e-5  # of its norms
_COMMON = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
}
_ATTENTION = {
    **_COMMON,
    "num_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "intermediate_size": "intermediate_size",
}
_EXPERTS = {"num_experts": "num_local_experts", "experts_per_tok": "num_experts_per_tok"}
_MAMBA2 = {
    "mamba2_num_heads": "num_heads",
    "mamba2_head_dim": "head_dim",
    "mamba2_state_size": "state_size",
    "mamba2_chunk_size": "chunk_size",
    "mamba2_n_groups": "n_groups",
    "mamba2_conv_kernel": "conv_kernel",
    "mamba2_expand": "expand",
}
_HYBRID = {
    "mamba2_num_heads": "mamba_n_heads",
    "mamba2_head_dim": "mamba_d_head",
    "mamba2_state_size": "mamba_d_state",
    "mamba2_chunk_size": "mamba_chunk_size",
    "mamba2_n_groups": "mamba_n_groups",
    "mamba2_conv_kernel": "mamba_d_conv",
    "mamba2_expand": "mamba_expand",
}
_LATENT = {
    "kv_latent_dim": "kv_lora_rank",
    "q_latent_dim": "q_lora_rank",
    "d_rope": "qk_rope_head_dim",
}
_NO_LATENT = (
    "has no equal: the library has no latent attention beside Mamba layers; plain attention is"
    " built"
)
_BALANCE = "the library's auxiliary loss over the whole batch: experts x their share x their chance"


class _Nearest(NamedTuple):
    """architecture: of the library. why: it is taken. build: reads the fields."""

    architecture: str
    why: str
    build: Callable[[ForeignConfig], None]


def is_beyond_language(foreign: ForeignConfig) -> bool:
    """Whether the model has parts that task language lacks."""
    parts = ("model.kv_latent_dim", "model.num_experts", "model.mamba_layers")
    return any(foreign.value(part) for part in parts)


def convert_library_model(foreign: ForeignConfig) -> None:
    """The `model` section, field by field; what is not served is left or refused by name."""
    nearest = _nearest(foreign)
    foreign.document.set("task", "huggingface", "a config of Oxidizr")
    foreign.add_default("model.architecture", nearest.architecture, nearest.why)
    _refuse_other_mambas(foreign)
    nearest.build(foreign)
    for field in foreign.open_fields("model."):
        if not foreign.value(field):
            foreign.ignore(field, "switched off")


def _nearest(foreign: ForeignConfig) -> _Nearest:
    mamba, layers = _mamba_layers(foreign), foreign.value("model.num_layers")
    experts, latent = foreign.value("model.num_experts"), foreign.value("model.kv_latent_dim")
    if mamba and len(mamba) == layers:
        return _Nearest("mamba2", "the nearest model: Mamba-2 layers alone", _mamba)
    if mamba and experts:
        return _Nearest(
            "granitemoehybrid",
            "the nearest model: Mamba-2 beside attention, with experts (here in every layer)",
            _hybrid_of_experts,
        )
    if mamba:
        return _Nearest(
            "bamba",
            "the nearest model: Mamba-2 beside attention (here with a feed-forward part in every"
            " layer)",
            _hybrid,
        )
    if latent:
        return _Nearest("deepseek_v3", "the nearest model: latent attention", _latent)
    if foreign.value("model.shared_expert_enabled"):
        return _Nearest(
            "granitemoeshared", "the nearest model: experts, one of them shared", _shared_experts
        )
    return _Nearest(
        "mixtral", "the nearest model: experts, the chosen ones' weights add to 1", _experts
    )


def _mamba_layers(foreign: ForeignConfig) -> list[object]:
    layers = foreign.value("model.mamba_layers")
    return layers if isinstance(layers, list) else []


def _refuse_other_mambas(foreign: ForeignConfig) -> None:
    """Mamba-1, which there is what mamba_layers means without mamba2_ fields, and Mamba-3."""
    for field in foreign.open_fields("model.mamba3_"):
        if foreign.value(field):
            foreign.refuse(
                field, "has no equal: the library has no Mamba-3", "leave it out for Mamba-2"
            )
    if _mamba_layers(foreign) and not foreign.value("model.mamba2_num_heads"):
        foreign.refuse(
            "model.mamba_layers",
            "without mamba2_num_heads is Mamba-1 there",
            "mamba2_num_heads, mamba2_head_dim, mamba2_state_size, ... for Mamba-2",
        )


def _rename(foreign: ForeignConfig, names: Mapping[str, str], why: str = "") -> None:
    for name, ours in names.items():
        foreign.convert(f"model.{name}", f"model.{ours}", why=why)


def _common(foreign: ForeignConfig, names: Mapping[str, str]) -> None:
    """What every model has. Rows are as long as the model is told to go."""
    length = foreign.value("model.max_seq_len")
    hidden = foreign.value("model.hidden_size")
    needs_width = "intermediate_size" in names and not foreign.value("model.intermediate_size")
    if needs_width and isinstance(hidden, int):
        foreign.add_default("model.intermediate_size", 4 * hidden, "4 x hidden_size")
    _rename(foreign, names)
    if length is not None:
        foreign.add_default("data.seq_len", length, "rows of max_seq_len tokens")


def _norms_and_positions(foreign: ForeignConfig, **more: object) -> None:
    """more: of the library's rope_parameters."""
    foreign.add_default("model.rms_norm_eps", _EPSILON, "norms' epsilon")
    theta = foreign.value("model.rope_theta")
    if theta is not None:
        rope = {"rope_type": "default", "rope_theta": theta, **more}
        foreign.convert("model.rope_theta", "model.rope_parameters", rope)


def _all_heads(foreign: ForeignConfig) -> None:
    """Without kv_heads every head has keys and values of its own."""
    heads = foreign.value("model.num_heads")
    if heads is not None and foreign.value("model.kv_heads") is None:
        foreign.add_default("model.num_key_value_heads", heads, "no kv_heads: as many as num_heads")


def _head_size(foreign: ForeignConfig) -> int | None:
    hidden, heads = foreign.value("model.hidden_size"), foreign.value("model.num_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None


def _balance(foreign: ForeignConfig) -> None:
    alpha = foreign.value("trainer.load_balance_alpha")
    if alpha is None:
        foreign.add_default("model.router_aux_loss_coef", 0.0, "no load_balance_alpha")
    foreign.convert("trainer.load_balance_alpha", "model.router_aux_loss_coef", why=_BALANCE)


def _not_shared(foreign: ForeignConfig, why: str) -> None:
    for name in _LATENT:
        foreign.ignore(f"model.{name}", why)


def _experts(foreign: ForeignConfig) -> None:
    _not_shared(foreign, "no kv_latent_dim: plain attention, there too")
    _all_heads(foreign)
    _common(foreign, {**_ATTENTION, **_EXPERTS})
    _norms_and_positions(foreign)
    _balance(foreign)


def _granite(foreign: ForeignConfig, *, shared: object) -> None:
    """shared: the width of the expert that every token meets."""
    _all_heads(foreign)
    _common(foreign, {**_ATTENTION, **_EXPERTS})
    size = _head_size(foreign)
    if size:
        foreign.add_default(
            "model.attention_multiplier", size**-0.5, "scores over the root of a head's size"
        )
    foreign.convert(
        "model.shared_expert_enabled",
        "model.shared_intermediate_size",
        shared,
        "the shared expert's width, as the others'",
    )
    _balance(foreign)


def _shared_experts(foreign: ForeignConfig) -> None:
    _not_shared(foreign, "no kv_latent_dim: plain attention, there too")
    _granite(foreign, shared=_width(foreign))
    _norms_and_positions(foreign)


def _width(foreign: ForeignConfig) -> object:
    """Of a feed-forward part."""
    hidden = foreign.value("model.hidden_size")
    default = 4 * hidden if isinstance(hidden, int) else None
    return foreign.value("model.intermediate_size", default)


def _hybrid_of_experts(foreign: ForeignConfig) -> None:
    _not_shared(foreign, _NO_LATENT)
    if foreign.value("model.shared_expert_enabled") is None:
        foreign.add_default("model.shared_intermediate_size", _width(foreign), "a shared expert")
    elif not foreign.value("model.shared_expert_enabled"):
        foreign.refuse(
            "model.shared_expert_enabled",
            "has no equal: the library's hybrid has a shared expert in every layer",
            "shared_expert_enabled: true",
        )
    _granite(foreign, shared=_width(foreign))
    mamba, layers = _mamba_layers(foreign), foreign.value("model.num_layers")
    kinds = [
        "mamba" if number in mamba else "attention"
        for number in range(layers if isinstance(layers, int) else 0)
    ]
    foreign.convert("model.mamba_layers", "model.layer_types", kinds)
    _rename(foreign, _HYBRID)
    _norms_and_positions(foreign)
    foreign.add_default("model.position_embedding_type", "rope", "rotary positions")
    _unpacked(foreign)


def _hybrid(foreign: ForeignConfig) -> None:
    _not_shared(foreign, _NO_LATENT)
    _no_experts(foreign)
    _all_heads(foreign)
    _common(foreign, _ATTENTION)
    mamba, layers = _mamba_layers(foreign), foreign.value("model.num_layers")
    others = [n for n in range(layers if isinstance(layers, int) else 0) if n not in mamba]
    foreign.convert(
        "model.mamba_layers", "model.attn_layer_indices", others, "the layers of attention"
    )
    _rename(foreign, _HYBRID)
    _norms_and_positions(foreign, partial_rotary_factor=1.0)
    _unpacked(foreign)


def _no_experts(foreign: ForeignConfig) -> None:
    for field in ("model.experts_per_tok", "model.shared_expert_enabled"):
        foreign.ignore(field, "goes with num_experts, of which there are none")


def _mamba(foreign: ForeignConfig) -> None:
    _common(foreign, _COMMON)
    _rename(foreign, _MAMBA2)
    foreign.ignore("model.mamba_layers", "all of them")
    foreign.add_default("model.layer_norm_epsilon", _EPSILON, "norms' epsilon")
    length = "rows are so long (data.seq_len); Mamba layers know no positions"
    foreign.ignore("model.max_seq_len", length)
    unused = (*_ATTENTION, *_EXPERTS, *_LATENT, "rope_theta", "shared_expert_enabled")
    for name in unused:
        foreign.ignore(f"model.{name}", "of layers with attention, of which there are none")
    foreign.ignore("trainer.load_balance_alpha", "balances experts; there are none")
    _unpacked(foreign)


def _unpacked(foreign: ForeignConfig) -> None:
    foreign.add_default("data.packing", False, "a row for each sample")


def _latent(foreign: ForeignConfig) -> None:
    """deepseek_v3: of every layer's experts one group; all layers dense without experts."""
    foreign.ignore("model.kv_heads", "latent attention has keys and values for every head")
    experts, layers = foreign.value("model.num_experts"), foreign.value("model.num_layers")
    heads, size = foreign.value("model.num_heads"), _head_size(foreign)
    width = _width(foreign)
    _common(foreign, {name: key for name, key in _ATTENTION.items() if name != "kv_heads"})
    if heads is not None:
        foreign.add_default("model.num_key_value_heads", heads, "as many as num_heads")
    if size:
        why = "a head's size beside its rotary part: hidden_size / num_heads"
        for name in ("qk_nope_head_dim", "v_head_dim"):
            foreign.add_default(f"model.{name}", size, why)
    if foreign.value("model.q_latent_dim") is None:
        foreign.add_default("model.q_lora_rank", None, "no q_latent_dim: queries at once")
    _rename(foreign, _LATENT)
    _norms_and_positions(foreign)
    foreign.add_default("model.rope_interleave", False, "halves are rotated, not neighbours")
    dense = 0 if experts else layers
    foreign.add_default("model.first_k_dense_replace", dense, "layers without experts")
    if not experts:
        _no_experts(foreign)
        foreign.ignore("trainer.load_balance_alpha", "balances experts; there are none")
        return
    foreign.convert("model.num_experts", "model.n_routed_experts")
    foreign.convert("model.experts_per_tok", "model.num_experts_per_tok")
    foreign.add_default("model.moe_intermediate_size", width, "an expert's width")
    if foreign.value("model.shared_expert_enabled") is None:
        foreign.add_default("model.n_shared_experts", 1, "a shared expert")
    shared = int(bool(foreign.value("model.shared_expert_enabled")))
    foreign.convert("model.shared_expert_enabled", "model.n_shared_experts", shared)
    for name, value in (("n_group", 1), ("topk_group", 1), ("routed_scaling_factor", 1.0)):
        foreign.add_default(f"model.{name}", value, "experts are one group, weights add to 1")
    foreign.ignore(
        "trainer.load_balance_alpha",
        "has no equal: the library has no auxiliary loss for deepseek_v3; its experts are chosen by"
        " sigmoids",
    )
