"""Words of a command line that the verb does not take, each refused with the line to type."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from samecurve.cli.options import dashes
from samecurve.errors import UserError

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


def refuse_trainer_flags(arguments: Sequence[str], own: set[str], command: str) -> None:
    """UserError: a flag of Hugging Face's Trainer, with the flag that serves the purpose here.

    own: the verb's flags. command: the verb as it is typed
    """
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        here = TRAINER_FLAGS.get(dashes(name)) if dashes(name) not in own else None
        if here is None:
            continue
        following = arguments[at + 1 : at + 2]
        if not equals and following and not following[0].startswith("--"):
            value = following[0]
        cause = f"{name} is a flag of Hugging Face's Trainer, and `{command}` does not have it"
        raise UserError(cause, f"in its place: {here.replace('VALUE', value or 'VALUE')}", name)


def refuse_words(words: Sequence[str], arguments: Sequence[str], command: str) -> None:
    """UserError: words that belong to no flag.

    arguments: the whole line behind the verb
    """
    if words:
        word = words[0]
        refuse_config(word, arguments, command)
        raise UserError(f"{word} belongs to no flag", f"`{command} --help` has the flags", word)


def refuse_config(word: str, arguments: Sequence[str], command: str) -> None:
    """UserError: the word is a config that stands alone, or beside another one."""
    if Path(word).suffix.lower() not in {".yaml", ".yml", ".json", ".toml"}:
        return
    if {"-f", "--file", "--config-path"} & set(arguments):
        raise UserError(f"{word} is a second config", "give one; --set changes values", word)
    at = list(arguments).index(word)
    line = [*command.split(), *arguments[:at], "-f", *arguments[at:]]
    raise UserError(f"{word} stands alone; -f names the config", shlex.join(line), word)
