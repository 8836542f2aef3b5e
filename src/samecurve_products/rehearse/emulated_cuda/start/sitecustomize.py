"""Python runs this file at its start where start/ is on PYTHONPATH: `import torch` finds GPUs."""

import os
import sys
from pathlib import Path

if os.environ.get("EMULATED_CUDA") == "1":
    sys.path.append(str(Path(__file__).parents[4]))  # of samecurve_products, installed or not
    from samecurve_products.rehearse.emulated_cuda import hook

    sys.path.pop()
    hook.install()
