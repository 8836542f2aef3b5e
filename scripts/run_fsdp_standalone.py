"""A Hugging Face model under FSDP, at a global batch of 64 on any number of GPUs.

torchrun --nproc_per_node=8 scripts/run_fsdp_standalone.py
torchrun --nproc_per_node=4 scripts/run_fsdp_standalone.py -f models/qwen2.5-7b.yaml
python scripts/run_fsdp_standalone.py        one GPU; says so where there are more

Flags are those of `samecurve train`.
"""

from pathlib import Path

from samecurve.cli.standalone import Standalone, run_standalone

CONFIG = Path(__file__).parents[1] / "models" / "llama-3.1-8b.yaml"

if __name__ == "__main__":
    run_standalone(Standalone("scripts/run_fsdp_standalone.py", CONFIG, "fsdp"))
