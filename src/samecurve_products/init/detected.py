"""The sentence that says which GPUs this machine has."""

from samecurve.seam import Machine, counted


def detected(machine: Machine) -> str:
    """'Detected 2 GPUs: NVIDIA H100', or why there is none."""
    if not machine.devices:
        return (
            "No GPU found: no driver of NVIDIA or AMD answers on this machine; runs train on"
            f" {counted(machine.cores, 'CPU core')}"
        )
    names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.devices))
    unfit = [f"{engine}: {why.cause}; {why.remedy}" for engine, why in machine.unfit.items()]
    return "; ".join([f"Detected {counted(len(machine.devices), 'GPU')}: {names}", *unfit])
