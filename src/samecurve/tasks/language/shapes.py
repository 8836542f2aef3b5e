"""The decoder's parameters, whatever the engine: their names (Hugging Face's Llama), shapes and
initial values.
"""

from samecurve.core.determinism.init_values import Initial
from samecurve.tasks.language.fields import LanguageModel


def shapes(fields: LanguageModel, vocab: int) -> dict[str, tuple[int, ...]]:
    """Matrices are [out, in]. Tied embeddings are one parameter, under the embedding's name."""
    width, kv = fields.hidden_size, fields.groups * fields.head_size
    block = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (fields.inner, width),
        "mlp.up_proj.weight": (fields.inner, width),
        "mlp.down_proj.weight": (width, fields.inner),
    }
    layers = {
        f"layers.{index}.{name}": shape
        for index in range(fields.num_layers)
        for name, shape in block.items()
    }
    head = {} if fields.tie_embeddings else {"lm_head.weight": (vocab, width)}
    return {"embed_tokens.weight": (vocab, width), **layers, "norm.weight": (width,), **head}


def initial(name: str, fields: LanguageModel) -> Initial:
    """GPT-2's: 0.02, and less by the root of the number of additions for what is added to the
    residual stream; norms begin as ones.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section
    2.3.
    """
    if "norm" in name:
        return Initial(0.0, 1.0)
    return Initial(
        0.02 / (2 * fields.num_layers) ** 0.5
        if name.endswith(("o_proj.weight", "down_proj.weight"))
        else 0.02
    )
