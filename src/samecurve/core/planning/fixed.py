"""Fixed: values that a run's first plan decided for good; and parsing of plans from JSON."""

from collections.abc import Hashable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from samecurve.core.config import MOST_PROCESSES
from samecurve.core.determinism.data_order import Anchor, Order
from samecurve.errors import SAME_BITS, UserError

T = TypeVar("T")
_MOST_SAMPLES = 1 << 53
ROWS_BESIDE = ", and by rows: "  # in a fingerprint, between what the user's code gives and a hash
CLIP_EPSILON = 1e-6  # added to the norm that is clipped: torch.nn.utils.clip_grad_norm_'s
_KEYS_ON_DISK = {
    "global_batch_size": "batch",
    "micro_batch_size": "slot",
    "computed_on": "made_on",
    "same_bits": "exact",
}


def as_mapping(value: object) -> Mapping[str, Any]:
    """The value as a mapping. ValueError: it is none."""
    if not isinstance(value, Mapping):
        raise ValueError("it is no mapping")
    return value


@cache  # 6 ms each
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_dataclass(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from JSON. ValueError: a value is missing, or of another type."""
    try:
        value: T = _adapter(cast("Hashable", kind)).validate_python(values)
        return value
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Values that a run's first plan decided for good. Every checkpoint has a copy."""

    global_batch_size: int | None  # None: to be decided anew (--new-batch)
    micro_batch_size: int
    seed: int
    samples: int
    fingerprint: str
    threads: int
    anchor: Anchor = Anchor()
    computed_on: str = ""  # engine and kind of device
    clip_epsilon: float = CLIP_EPSILON
    same_bits: bool = False  # on any devices

    def to_json(self) -> dict[str, Any]:
        """The form in manifest.json and plan.json, whose public keys are older than our names."""
        return {_KEYS_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "Fixed":
        """The copy in a checkpoint. ValueError: as from_json()."""
        return cls.from_json(
            {"exact": has_same_bits(manifest), **as_mapping(manifest.get("fixed"))}
        )

    @classmethod
    def from_json(cls, value: object) -> "Fixed":
        """ValueError: a key is missing, not known, or has no such value."""
        names = {key: name for name, key in _KEYS_ON_DISK.items()}
        renamed = {names.get(key, key): item for key, item in as_mapping(value).items()}
        # runs older than clip_epsilon clipped without it, and go on so
        values = {"clip_epsilon": 0.0, **renamed}
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"{min(unknown)} is not known")
        parsed = parse_dataclass(cls, values)
        sizes = [parsed.micro_batch_size, parsed.samples]
        if parsed.global_batch_size is not None:
            sizes.append(parsed.global_batch_size)
        if min(sizes) < 1 or max(sizes) > _MOST_SAMPLES or min(astuple(parsed.anchor)) < 0:
            raise ValueError("a batch, a number of samples or an anchor out of range")
        if not 1 <= parsed.threads <= MOST_PROCESSES or not 0 <= parsed.clip_epsilon < 1:
            raise ValueError("threads or clip_epsilon out of range")
        return parsed


def has_same_bits(manifest: Mapping[str, Any]) -> bool:
    """Whether the run of a checkpoint has the same bits on any devices. Runs that are older than
    the key have what their config says.
    """
    asked = manifest.get("config", {}).get(SAME_BITS) is True
    return bool(manifest.get("fixed", {}).get("exact", asked))


def make_order(
    samples: int, buckets: Mapping[str, tuple[int, ...]], global_batch_size: int, fixed: Fixed
) -> Order:
    """The order of a run's samples.

    buckets: as Facts has them
    UserError: another batch begins within an epoch of buckets.
    """
    if not buckets.get("train"):
        return Order(samples, global_batch_size, fixed.seed, fixed.anchor)
    from samecurve.core.bucket_order import BucketOrder  # few runs have buckets

    if fixed.anchor.consumed:
        raise UserError(
            f"another batch can't begin within an epoch of buckets: {fixed.anchor.consumed} of its"
            f" {samples} samples are trained on, and a bucket's rest would be cut otherwise",
            "leave --new-batch out, or resume with it from a checkpoint at the end of an epoch",
            "--new-batch",
        )
    sizes = tuple(buckets["train"])
    return BucketOrder(samples, global_batch_size, fixed.seed, fixed.anchor, sizes)


def is_same_data(kept: str, now: str) -> bool:
    """Whether data is that of a run. An earlier version kept no rows beside a fingerprint().

    kept: the fingerprint in the run's plan; now: the fingerprint of the data
    """
    own, beside, _ = now.rpartition(ROWS_BESIDE)
    return now == kept or (bool(beside) and own == kept)


def check_same_run(fixed: Fixed | None, samples: int, fingerprint: str, seed: int) -> None:
    """UserError: there is no data, or the run began with other data or another seed."""
    if samples < 1:
        raise UserError(
            "the training data has no sample", "give more text, or a shorter --seq-len", "data"
        )
    if fixed is None:
        return
    if not is_same_data(fixed.fingerprint, fingerprint):
        raise UserError(
            "the data, or how this version reads it, has changed since this run began",
            "bring the old data back; data.too_long as it was; data.split=all, where an earlier"
            " version trained on files named test too; or begin a new run with another --save-dir",
            "data",
        )
    if fixed.seed != seed:
        raise UserError(
            f"this run began with seed {fixed.seed}, not {seed}",
            f"--set train.seed={fixed.seed}, or another --save-dir",
            "train.seed",
        )
