"""What NCCL and torch refuse of a collective's tensors, in torch's words."""

import warnings
from collections.abc import Sequence

import torch

_NAMES = {
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}
_KNOWN = {
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
}


def check_single(tensor: torch.Tensor, *, peer_to_peer: bool = False) -> None:
    """Refuse a tensor that NCCL cannot take. Raises ValueError or TypeError."""
    if not tensor.is_cuda or tensor.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    if not _is_packed(tensor):
        if not peer_to_peer:
            raise ValueError("Tensors must be contiguous")
        warnings.warn(
            "Detected non-contiguous tensor in P2P operations. It is user responsibility to"
            " guarantee that source and destination tensors have the same contiguity format.",
            stacklevel=2,
        )
    if tensor.dtype not in _KNOWN:
        name = _NAMES.get(tensor.dtype, str(tensor.dtype))
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {name}")


def check_list(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a list of tensors whose members differ in type or device."""
    if not tensors:
        raise ValueError("Tensor list must be nonempty")
    for tensor in tensors:
        check_single(tensor)
        if tensor.dtype != tensors[0].dtype:
            raise TypeError("Tensors must have identical type")
        if tensor.device != tensors[0].device:
            raise ValueError("Expected list of tensors on the same device")


def check_splits(sizes: Sequence[int], tensor: torch.Tensor, ranks: int) -> list[int]:
    """The rows of `tensor` for each rank. sizes: as the caller gave them; empty: equal parts."""
    rows = tensor.shape[0]
    if not sizes:
        if rows % ranks:
            raise ValueError("Tensor's dim 0 does not divide equally across group size")
        return [rows // ranks] * ranks
    if len(sizes) != ranks:
        raise ValueError("Number of tensor splits not equal to group size")
    if sum(sizes) != rows:
        raise ValueError("Split sizes doesn't match total dim 0 size")
    return list(sizes)


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous in the memory format that its strides suggest."""
    if tensor.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    known = formats.get(tensor.dim())
    return known is not None and tensor.is_contiguous(memory_format=known)
