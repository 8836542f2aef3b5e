"""State-space vision models under JAX on all visible devices: CSSM's lines, typed as they are.

python main.py --arch vit --cssm hgru_bi --batch_size 64 --bf16 --checkpoint_dir DIR
CUDA_VISIBLE_DEVICES=0,1,2,3 python main.py --arch vit --cssm gated --batch_size 256 --bf16

Flags are those of `samecurve train`. Trained is models/cssm.yaml, 64 images a device at once, where
no -f and no --batch_size say otherwise.
"""

import sys
from pathlib import Path

from samecurve.cli.main import main

CONFIG = Path(__file__).parents[1] / "models" / "cssm.yaml"

if __name__ == "__main__":
    ours = ["train", "-f", str(CONFIG), "--batch-size", "64"]  # what is typed wins
    sys.argv = ["samecurve", *ours, *sys.argv[1:]]
    main()
