"""The places in a store that a command line of `train` names, brought to this machine."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.remote.claimed import Claim, claimed
from samecurve.run.remote.local_copy import local_copy, local_weights
from samecurve.run.resume import Options
from samecurve.storage.url import ObjectUrl, is_url, parse_url


@contextmanager
def places_at_hand(options: Options, patience: float) -> Iterator[tuple[Options, Claim | None]]:
    """The options with paths of this machine alone, and the claim on the run's place in a store.

    The claim is released if the block fails. patience: as Claim has it

    UserError: a place has nothing, or belongs to a live run. StorageError: it can't be reached.
    """
    options = _with_resumed(options)
    with claimed(options.save_url, patience) if options.save_url else nullcontext() as claim:
        if claim:
            options = replace(options, save_dir=claim.home, save_url=None)
        if options.init_url:
            weights = _weights(options.init_url, options.save_dir)
            options = replace(options, init_from=weights, init_url=None)
        yield options, claim


def _with_resumed(options: Options) -> Options:
    """The options with --resume URL as what it means."""
    if not is_url(options.resume):
        return options
    url = parse_url(options.resume, "--resume")
    if options.save_dir is None and options.save_url is None:
        if "checkpoints" in url.prefix.split("/"):
            raise UserError(
                f"{url} is a checkpoint, and the run that goes on from it needs a place",
                "--save-dir, the address or path of a new run; or --resume with the run's address",
                "--resume",
            )
        return replace(options, resume="auto", save_url=url)
    if options.save_url == url:
        return replace(options, resume="auto")
    return replace(options, resume=str(local_copy(url, "newest", "--resume")))


def _weights(url: ObjectUrl, save_dir: Path | None) -> Path:
    """The weights that --init-from names. A run that has begun from them keeps its own copy."""
    began = Run(save_dir).weights_path() if save_dir else None
    if began and url.short_name in Path(began).parts:
        return Path(began)
    return local_weights(url, "--init-from")
