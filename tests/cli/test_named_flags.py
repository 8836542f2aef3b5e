"""Messages and pages of the program name only flags that it has: a remedy is typed as it stands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from samecurve.cli.main import cli
from samecurve.cli.unknown_arguments import TRAINER_FLAGS

SOURCE = Path(__file__).parents[2] / "src/samecurve"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]")
OF_OTHERS = {  # of git, tar, pip, containers, torchrun, job engines, XLA, the hub, kohya, drivers
    *("--get-regexp", "--ignore-submodules", "--includes", "--name-only", "--no-ext-diff"),
    *("--no-optional-locks", "--no-textconv", "--quiet", "--show-scope", "--verify"),
    *("--dereference", "--hard-dereference", "--keep", "--sort"),
    *("--index-url", "--python", "--ipc", "--pids-limit", "--share", "--shm-size", "--upgrade"),
    *("--gpu-reset", "--ulimit"),
    *("--showbus", "--showmeminfo", "--showproductname", "--showuniqueid"),
    *("--config-file", "--dataset-config", "--local-dir"),
    *TRAINER_FLAGS,
    *("--local-rank", "--master-addr", "--master-port", "--nproc-per-node"),
    *(
        "--array",
        "--cpus-per-task",
        "--gres",
        "--gpus-per-task",
        "--kill-on-bad-exit",
        "--ntasks-per-node",
    ),
    *("--chdir", "--constraint", "--job-name", "--open-mode", "--requeue", "--signal"),
    *("--detach-run", "--filename", "--working-dir", "--yes"),
    *("--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id"),
    "--xla-cpu-collective-call-terminate-timeout-seconds",
    "--xla-cpu-collective-call-warn-stuck-timeout-seconds",
    "--xla-force-host-platform-device-count",
}


def test_messages_name_flags_that_exist() -> None:
    known = {"--version", *OF_OTHERS, *_own_flags()}
    unknown = {flag: place for flag, place in _named_flags() if flag not in known}
    assert unknown == {}
    assert "--eval-every" not in known  # which two remedies named


def _own_flags(group: click.Group = cli) -> Iterator[str]:
    """The flags of all verbs, and of the verbs within a verb (`queue add`)."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        for option in command.get_params(click.Context(command)):
            yield from map(_spelled, (*option.opts, *option.secondary_opts))
        if isinstance(command, click.Group):
            yield from _own_flags(command)


def _named_flags() -> Iterator[tuple[str, str]]:
    """Each flag in a text of the source, with its place."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for flag in FLAG.findall(node.value):
                    yield _spelled(flag), f"{file.name}:{node.lineno}"
    for file in SOURCE.rglob("*.yaml"):
        for flag in FLAG.findall(file.read_text()):
            yield _spelled(flag), file.name


def _spelled(flag: str) -> str:
    """Underscores and dashes are one."""
    return flag.replace("_", "-")
