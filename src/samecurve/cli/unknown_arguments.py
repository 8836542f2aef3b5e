"""Words of a command line that the verb does not take, each refused with the line to type."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from samecurve.errors import UserError

_HOSTS = (
    "over several hosts: samecurve train -f FILE --engine jax --nnodes N --rdzv HOST:PORT"
    " --node-rank I, on each of them"
)
# torchrun's flags, where the verb has none of that name
TORCHRUN_HINTS = {
    "--standalone": "leave it out: ranks of one machine meet by themselves",
    "--nnodes": f"for one host leave it out; {_HOSTS}",
    "--node-rank": _HOSTS,
    "--master-addr": _HOSTS,
    "--rdzv-endpoint": _HOSTS,
    "--rdzv-backend": _HOSTS,
    "--rdzv-id": _HOSTS,
    "--rdzv-conf": _HOSTS,
}
# flags of Hugging Face's TrainingArguments; what is typed here, where VALUE is the typed value
TRAINER_FLAGS: Mapping[str, str] = {
    "--per-device-train-batch-size": "--batch-size VALUE",
    "--gradient-accumulation-steps": "--grad-accum VALUE",
    "--num-train-epochs": "--epochs VALUE",
    "--learning-rate": "--lr VALUE",
    "--warmup-steps": "--warmup VALUE",
    "--max-grad-norm": "--set optimizer.clip=VALUE",
    "--lr-scheduler-type": "--set schedule.decay=VALUE",
    "--optim": "--set optimizer.name=VALUE",
    "--seed": "--set train.seed=VALUE",
    "--eval-steps": "--set train.eval_every=VALUE",
    "--save-steps": "--set train.save_every=VALUE",
    "--logging-steps": "--set train.log_every=VALUE",
    "--save-total-limit": "--max-checkpoints VALUE",
    "--dataloader-num-workers": "--num-workers VALUE",
    "--output-dir": "--save-dir VALUE",
    "--fp16": "--dtype f16",
    "--torch-compile": "--compile",
    "--gradient-checkpointing": "--set train.recompute=block",
}

# values of these flags that have another name here
TRAINER_VALUES = {
    "constant_with_warmup": "constant",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
}


def refuse_flag(flag: str, arguments: Sequence[str], own: set[str], command: str) -> None:
    """UserError: the flag is another tool's, and a flag of the verb serves its purpose.

    arguments: the whole line behind the verb. own: the verb's flags. command: the verb as typed
    """
    if flag in TORCHRUN_HINTS:
        raise UserError(f"{flag} is torchrun's", TORCHRUN_HINTS[flag])
    here = TRAINER_FLAGS.get(flag, "")
    if here.partition(" ")[0] not in own:
        return
    names = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    at = names.index(flag)
    _, _, value = arguments[at].partition("=")
    following = arguments[at + 1 : at + 2]
    if not value and following and not following[0].startswith("--"):
        value = following[0]
    cause = f"{flag} is a flag of Hugging Face's Trainer, and `{command}` does not have it"
    value = TRAINER_VALUES.get(value, value)
    raise UserError(cause, f"in its place: {here.replace('VALUE', value or 'VALUE')}")


def refuse_word(word: str, arguments: Sequence[str], command: str) -> NoReturn:
    """UserError: a word that belongs to no flag."""
    refuse_config(word, arguments, command)
    raise UserError(f"{word} belongs to no flag", f"`{command} --help` has the flags", word)


def refuse_config(word: str, arguments: Sequence[str], command: str) -> None:
    """UserError: the word is a config that stands alone, or beside another one."""
    if Path(word).suffix.lower() not in {".yaml", ".yml", ".json", ".toml"}:
        return
    flags = {argument.partition("=")[0] for argument in arguments}
    if {"-d", "--data"} & flags:
        raise UserError(
            f"{word} belongs to no flag",
            "-d takes one file, folder or pattern in quotes ('data/*.json'); -f names a config",
            word,
        )
    if {"-f", "--file", "--config-path"} & flags:
        raise UserError(f"{word} is a second config", "give one; --set changes values", word)
    at = list(arguments).index(word)
    line = [*command.split(), *arguments[:at], "-f", *arguments[at:]]
    raise UserError(f"{word} stands alone; -f names the config", shlex.join(line), word)
