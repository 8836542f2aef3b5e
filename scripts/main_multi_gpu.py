"""Windows of sensor channels under DP or DDP: the HAR guide's lines, typed as they stand there.

torchrun --nproc_per_node=4 scripts/main_multi_gpu.py --multi-gpu ddp --mode flatten --epochs 20
    --batch-size 32 --lr 4e-3 --warmup-epochs 2 --num-workers 4 --save-dir checkpoints/ddp_4gpu
python scripts/main_multi_gpu.py --multi-gpu dp --gpu-ids 0,1,3

Flags are those of `samecurve train`. Trained is models/har.yaml, 32 windows a device at once, where
no -f and no --batch-size say otherwise; with TensorBoard's files, where it is installed.
"""

import importlib.util
import os
import sys
from pathlib import Path

from samecurve.cli.main import main
from samecurve.core.system.installation import install_command
from samecurve.terminal import echo

CONFIG = Path(__file__).parents[1] / "models" / "har.yaml"

if __name__ == "__main__":
    curves = ["--tensorboard"] if importlib.util.find_spec("tensorboard") else []
    if not curves and os.environ.get("RANK", "0") == "0":
        note = "note   tensorboard is not installed, so there will be no files for it: "
        echo(note + install_command("tensorboard"), err=True)
    ours = ["train", "-f", str(CONFIG), "--batch-size", "32", *curves]  # what is typed wins
    sys.argv = ["samecurve", *ours, *sys.argv[1:]]
    main()
