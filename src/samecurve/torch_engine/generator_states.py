"""Whether somebody has drawn random numbers of torch's."""

import torch


def generator_states(device: torch.device) -> list[bytes]:
    """What changes with each number: of the host's generator and of this device's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]
