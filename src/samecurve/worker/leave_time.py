"""How long a rank may take to leave, once a signal has asked it to stop."""

from collections.abc import Mapping

from samecurve.errors import UserError

_VARIABLE = "SAMECURVE_LEAVE_SECONDS"
_DEFAULT = 20.0  # torchrun kills its ranks 30 s after its SIGTERM


def leave_seconds(environment: Mapping[str, str]) -> float:
    """Seconds from the signal to the end, with the last step and the save.

    UserError: the variable is no number of seconds.
    """
    text = environment.get(_VARIABLE, "")
    if not text:
        return _DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UserError(
            f"{_VARIABLE} is {text!r}",
            f"a number of seconds, shorter than what the engine grants; unset: {_DEFAULT:g}",
            "environment",
        )
    return seconds
