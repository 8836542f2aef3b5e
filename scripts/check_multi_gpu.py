"""Check whether this machine is fit to train on several GPUs: the line of OneTrainer's guide.

python scripts/check_multi_gpu.py
python scripts/check_multi_gpu.py --gpus 0,1 --json

Flags are those of `samecurve check`. Exit code 1 if something is wrong.
"""

import sys

from samecurve.cli.main import main

if __name__ == "__main__":
    sys.argv = ["samecurve", "check", *sys.argv[1:]]
    main()
