"""The line that names parameters that the loss does not use."""

from collections.abc import Sequence

from samecurve.units import some


def unused_line(names: Sequence[str]) -> str:
    """The line for the user. names: of the parameters that the loss has not used."""
    them = "them" if len(names) > 1 else "it"
    stays = "they stay as they are" if len(names) > 1 else "it stays as it is"
    return (
        f"the loss does not use {some(names, 4)}: {stays}, without an update or weight"
        f" decay, until it does. If that is meant, freeze {them}, which saves memory and this line:"
        " parameter.requires_grad_(False) in the model, or freeze: true in optimizer.groups"
    )
