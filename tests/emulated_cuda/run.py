"""Runs a command on emulated GPUs, such as all tests marked `gpu`:

python tests/emulated_cuda/run.py python -m pytest -m gpu tests/torch_engine

Before the command: --devices N (2) and --gpu NAME (H100).
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from samecurve_products.rehearse.emulated_cuda import build
from samecurve_products.rehearse.emulated_cuda.machine import GPUS, Emulation


def main() -> None:
    """Become the command, with the environment of the emulated machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    asked = parser.parse_args()
    if not asked.command:
        parser.error("no command: python tests/emulated_cuda/run.py python -m pytest -m gpu")
    try:
        build.library()
        emulation = Emulation(devices=asked.devices, gpu=asked.gpu)
    except (build.CannotEmulateError, ValueError) as error:
        sys.exit(f"no emulated GPUs: {error}")
    os.execvpe(asked.command[0], asked.command, {**os.environ, **emulation.environment()})


if __name__ == "__main__":
    main()
