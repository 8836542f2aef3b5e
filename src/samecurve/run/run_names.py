"""Names of new run directories."""

import time
from pathlib import Path

from samecurve.errors import UserError


def free_name(name: str, flag: str = "--save-dir") -> Path:
    """Make the directory runs/NAME-TIME. Two runs that start at once get two directories."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        home = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            home.mkdir(parents=True)
            return home
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"{home} can't be made: {error.strerror}", f"{flag} DIR where you may write", flag
            ) from None
    raise UserError(f"{base} and 998 like it exist", f"{flag} DIR", flag)
