"""Names of an adapter's arrays: in a model, and in files as peft writes them.

A layer L that has an adapter holds its own arrays as L.base_layer.weight, and the adapter's as
L.lora_A.default.weight and so on. Files leave `default`, the adapter's own name, out.
"""

from collections.abc import Mapping

import torch

NAME = "default"  # peft's own for the only adapter
BASE = ".base_layer."  # between a layer's name and its own arrays
A, B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
MAGNITUDE = f".lora_magnitude_vector.{NAME}.weight"
W1, W2 = f".lokr_w1.{NAME}", f".lokr_w2.{NAME}"
W2_A, W2_B = f".lokr_w2_a.{NAME}", f".lokr_w2_b.{NAME}"  # w2 = w2_a w2_b
OWN = (A, B, MAGNITUDE, W1, W2, W2_A, W2_B)  # what an adapter adds to a layer's name


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's tensors of a model, under the names that files have."""
    return {name_in_files(name): tensor for name, tensor in tensors.items() if name.endswith(OWN)}


def name_in_files(name: str) -> str:
    """The name of an adapter's array in a file."""
    own = next(own for own in OWN if name.endswith(own))
    in_files = own.replace(f".{NAME}", "")
    if own == MAGNITUDE:
        in_files = in_files.removesuffix(".weight")
    return name.removesuffix(own) + in_files
