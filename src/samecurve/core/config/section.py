"""What every part of the config is: frozen, without unknown keys, without guesses at what a value
means.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )
