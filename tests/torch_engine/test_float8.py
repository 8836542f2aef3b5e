"""train.float8: which layers it converts, and that training follows bf16's; here in f32 that is
rounded to eight bits, as a GPU's kernels would.
"""

import pytest
import torch

from samecurve.errors import UserError
from samecurve.torch_engine.model.model_setup import seeded
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.torch_task import Decoder

pytest.importorskip("torchao", reason="torchao is not installed (the extra fp8)")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of its import
FIELDS = LanguageModel(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=40,
    max_seq_len=16,
    tie_embeddings=True,
)


def decoder() -> Decoder:
    with seeded(0):
        return Decoder(FIELDS, 64)


def test_layers_of_fitting_size_in_blocks_are_converted_and_gradients_follow() -> None:
    from samecurve.features.float8.conversion import convert

    plain, narrow, cpu = decoder(), decoder(), torch.device("cpu")
    converted = convert(narrow, cpu, emulate=True)
    assert converted == sorted(
        f"layers.{block}.self_attn.{part}_proj" for block in range(2) for part in "qkvo"
    )  # 40 is no multiple of 16, and the head is in no block
    assert [name for name, _ in narrow.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    tokens = torch.arange(64).view(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (plain, narrow):
            torch.autograd.backward(model(tokens, tokens))
    apart = [
        float((a.grad - b.grad).norm() / b.grad.norm())
        for a, b in zip(narrow.parameters(), plain.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ]
    assert len(apart) == len([*plain.parameters()])
    assert 1e-3 < max(apart) < 0.3
    with pytest.raises(UserError, match="multiples of 16"):
        convert(
            Decoder(FIELDS.model_copy(update={"hidden_size": 24, "intermediate_size": 24}), 64),
            cpu,
            emulate=True,
        )
