"""An adapter on a base in host memory (devices.offload_frozen): no bit changes, whatever the base
is held in.
"""

from pathlib import Path

import pytest
from test_huggingface_adapters import LORA, make_base, values

from samecurve.checkpoint.format import load
from samecurve.observe import read_events
from starts import start, train
from worlds import Pool


@pytest.mark.parametrize(
    ("quantize", "layout"),
    [
        pytest.param("bf16", "single:1", marks=pytest.mark.long),
        pytest.param("none", "ddp:2", marks=pytest.mark.long),
        pytest.param("8bit", "ddp:2", marks=pytest.mark.long),
        pytest.param("4bit", "single:1", marks=pytest.mark.long),
        pytest.param("4bit", "dp:2", marks=pytest.mark.long),
    ],
)
def test_no_bit_changes(
    quantize: str, layout: str, pool: Pool, tmp_path: Path, cache: Path
) -> None:
    if quantize in {"8bit", "4bit"}:
        pytest.importorskip("bitsandbytes")
    make_base(tmp_path)
    left = []
    for share in (0.0, 1.0):
        here = values(tmp_path, layout)
        here["model"] = {**here["model"], "adapter": LORA, "quantize": quantize}
        here["train"] = {"steps": 3, "precision": "bf16", "eval_every": 2, "recompute": "block"}
        here["data"] = {**here["data"], "prompts": ["the "], "sample_tokens": 4}
        here["train"]["sample_every"] = 2
        here["devices"] = {**here["devices"], "offload_frozen": share}
        prepared = start(tmp_path / f"{share}", here, cache)
        assert ("buffers" in {term.name for term in prepared.plan.memory}) == bool(share)
        losses = train(pool, prepared)
        events = read_events(prepared.run.journal)
        said = [event.values["loss"] for event in events if event.kind == "evaluated"]
        said += [event.values["texts"] for event in events if event.kind == "sampled"]
        last = max(prepared.run.checkpoints.glob("step-*"))
        arrays = {name: array.tobytes() for name, array in load(last).arrays.items()}
        left.append((losses, said, arrays))
    assert left[0] == left[1]
    assert len(left[0][1]) == 4
