"""A Hugging Face model at a global batch of 64 on any number of GPUs.

DDP where each GPU holds the whole model, else FSDP; the plan says which was taken, and why.

torchrun --nproc_per_node=8 scripts/run_hf_standalone.py
torchrun --nproc_per_node=4 scripts/run_hf_standalone.py -f models/qwen2.5-7b.yaml
python scripts/run_hf_standalone.py        one GPU; says so where there are more

Flags are those of `samecurve train`: --strategy ddp asks for DDP alone.
"""

from pathlib import Path

from samecurve.cli.standalone import Standalone, run_standalone

CONFIG = Path(__file__).parents[1] / "models" / "llama-3.1-8b.yaml"

if __name__ == "__main__":
    run_standalone(Standalone("scripts/run_hf_standalone.py", CONFIG, "auto"))
