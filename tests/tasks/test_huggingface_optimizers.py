"""Models of the transformers library under the config's optimizers of whole matrices."""

from pathlib import Path

import pytest
from test_huggingface import config

from one_curve import check_one_curve
from samecurve.tasks import open_task
from worlds import Pool


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral", "mamba2"])
def test_devices_do_not_change_the_curve(
    model: str, optimizer: str, pool: Pool, tmp_path: Path
) -> None:
    """Ragged rows; experts in stacks of matrices; tied embeddings."""
    layouts = ["ddp:3", "fsdp:2/4", "fsdp:3..ddp:2"]
    trained = config(model, "Ragged", optimizer={"name": optimizer, "lr": 3e-3})
    check_one_curve(trained, layouts, pool, tmp_path, steps=5, near=1e-10)


def test_muon_has_the_hidden_matrices_of_a_library_model(cache: Path) -> None:
    """Experts and router too; not embeddings, the head, or a convolution."""
    hidden = open_task(config("mixtral"), cache).facts().updates.hidden_matrices
    of_layer = {name.partition("layers.1.")[2] for name in hidden} - {""}
    assert of_layer == {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
        "mlp.gate.weight",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    assert len(hidden) == 2 * len(of_layer)
