"""Layers that image trainers keep in host memory, as devices.offload_frozen.

Each has words of its own for a share of the denoiser's layers that wait in host memory. Here that
is served for frozen weights, beneath an adapter. It changes no result, so what is not served is
left out with its reason.
"""

from samecurve_products.convert.foreign_config import SAME, ForeignConfig
from samecurve_products.convert.onetrainer_model import of_unet
from samecurve_products.convert.values import is_number

_KEY = "devices.offload_frozen"
_TRAINED = (
    "weights that are trained stay on their device; --strategy fsdp with --set devices.offload=true"
    " needs less of it"
)
_ALL = f"--set {_KEY}=1 moves all of its blocks, here"
_FLUX_BLOCKS = 38  # of FLUX.1's weights half are in 38 blocks, half in 19 that are twice as large


def onetrainer_layers(foreign: ForeignConfig) -> None:
    """Read offload_fraction of the part that is trained, or layer_offload_fraction of older files.

    Both are the share of the bytes of the layers, and move layers that are computed again.
    """
    part = "unet" if of_unet(foreign.value("model_type")) else "transformer"
    own, older = f"{part}.offload_fraction", "layer_offload_fraction"
    is_older_on = str(foreign.value("gradient_checkpointing", "ON")).upper() == "CPU_OFFLOADED"
    again = foreign.value(f"{part}.gradient_checkpointing")
    is_own_on = again is not False
    for field, moves in ((own, is_own_on), (older, is_older_on)):
        why = ""
        if not foreign.value(field):
            why = "no layer is moved"
        elif foreign.is_set(_KEY):
            why = f"{own} is there, and wins"
        elif part == "unet":
            why = f"moves nothing of a UNet, there; {_ALL}"
        elif not moves:
            why = "moves layers that are computed again (gradient_checkpointing), and none are"
        elif foreign.value("training_method") != "LORA":
            why = _TRAINED
        if why:
            foreign.ignore(field, why)
        else:
            _move(foreign, field, SAME, "share of the layers", compiled="compile")


def kohya_blocks(foreign: ForeignConfig) -> None:
    """Read blocks_to_swap, which is a share of the model only where its number of blocks is known.

    Of FLUX.1, n is n/2 of 19 blocks with two streams, and n of the 38 others: n/38 of the weights.
    """
    field, count = "blocks_to_swap", foreign.value("blocks_to_swap")
    if not count:
        foreign.ignore(field, "no block is moved")
    elif foreign.value("network_module") is None:
        foreign.ignore(field, _TRAINED)
    elif foreign.value("network_module") != "networks.lora_flux" or not is_number(count):
        why = f"how many blocks the model has is not in the file; --set {_KEY}=0.5 moves half"
        foreign.ignore(field, why)
    else:
        share = min(1.0, round(count / _FLUX_BLOCKS, 3))
        why = f"{count:g}/{_FLUX_BLOCKS} of FLUX.1's weights"
        _move(foreign, field, share, why, compiled="torch_compile")


def aitoolkit_layers(foreign: ForeignConfig) -> None:
    """Read model.layer_offloading, with its share of the denoiser's layers."""
    field, percent = "model.layer_offloading", "model.layer_offloading_transformer_percent"
    share = foreign.value(percent, 1.0)
    if foreign.value(field) is not True or not share:
        foreign.ignore(field, "no layer is moved")
    elif not foreign.is_set("model.adapter.rank"):
        foreign.ignore(field, _TRAINED)
    else:
        _move(foreign, field, share, "share of the layers", compiled="model.compile")
        foreign.note(percent, f"{_KEY}, read with layer_offloading")


def simpletuner_layers(foreign: ForeignConfig) -> None:
    """Read ramtorch, with its percent of the denoiser's layers, or enable_group_offload: all."""
    percent = foreign.value("ramtorch_transformer_percent", 100)
    shares = {
        "ramtorch": percent / 100 if is_number(percent) else percent,
        "enable_group_offload": 1.0,
    }
    for field, share in shares.items():
        if foreign.value(field) is not True or not share:
            foreign.ignore(field, "no layer is moved")
        elif foreign.value("model_type", "lora") != "lora":
            foreign.ignore(field, _TRAINED)
        elif foreign.value("fsdp_enable") is True:
            foreign.ignore(field, "fsdp shares the weights out, and has devices.offload")
        elif field == "ramtorch" and foreign.value("ramtorch_target_modules") is not None:
            why = f"names its layers; here a share of the blocks is moved: --set {_KEY}=0.5"
            foreign.ignore(field, why)
        else:
            _move(foreign, field, share, "share of the layers")
    if foreign.is_set(_KEY):
        foreign.note("ramtorch_transformer_percent", f"{_KEY}, read with ramtorch")
    if foreign.value("musubi_blocks_to_swap"):
        why = f"how many blocks the model has is not in the file; --set {_KEY}=0.5 moves half"
        foreign.ignore("musubi_blocks_to_swap", why)


def _move(foreign: ForeignConfig, field: str, share: object, why: str, compiled: str = "") -> None:
    """Make a field the share of the frozen blocks in host memory.

    compiled: the field that asks for a compiled model, which is not built together with that
    """
    foreign.convert(field, _KEY, share, why)
    if compiled and foreign.value(compiled):
        foreign.ignore(compiled, f"nothing is compiled where blocks lie in host memory ({_KEY})")
