"""Facts of a config's task, obtained in a subprocess, so that the launcher imports no engine.

Facts are cached under a key of all that they follow from.
"""

import hashlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import samecurve
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_of_run
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.system import write_json
from samecurve.core.system.cache import cache_home
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.processes import Call, ForkServer, child_environment, start_process
from samecurve.tasks import Tasks, entry_of
from samecurve.terminal import PROGRESS, shown_progress

_FRAMES, _TEXT_LINES = 8, 8  # lines shown of a describing process that failed


def missing_libraries(engine: str) -> list[str]:
    """The libraries of an engine that are not installed."""
    needed = ("jax", "flax", "optax") if engine == "jax" else ()
    return [name for name in needed if find_spec(name) is None]


def check_installed(config: Config) -> None:
    """UserError: libraries that the config needs are not installed."""
    if absent := missing_libraries(config.engine):
        from samecurve.core.system.installation import install_command

        raise UserError(
            f"engine {config.engine} needs {', '.join(absent)}: not installed",
            f"{install_command('jax')} (for NVIDIA GPUs also 'jax[cuda13]'), or --engine torch",
            "engine",
        )
    for row in config.named_features:
        for name, extra in row.load().libraries.items():
            if find_spec(name) is None:
                from samecurve.core.system.installation import install_command

                key = row.keys[0]
                cause = f"{key} needs {name}: not installed"
                raise UserError(cause, f"{install_command(extra)}, or leave {key} out", key)


def describe(
    config: Config, server: ForkServer | None = None, *, kept: Path | None = None
) -> Facts:
    """The facts of the config's task, from the cache or from a process that reads the task.

    server: forks that process; None: it is started
    kept: a directory with the facts of an earlier start of the same command; the ranks find out
        whether the data is still the same

    UserError: model or data are not as the config has them (missing file, empty corpus).
    """
    check_installed(config)
    cache = cache_home()
    stamp = entry_of(config.task).data_stamp(config)
    if stamp is None and kept is None:
        return Facts.from_json(_in_subprocess(config, cache, server))
    place = cache / "facts"
    if stamp is None and kept:
        stamp, place = entry_of(config.task).code_stamp(config), kept
    identity = _identity(config, stamp)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    path = place / f"{key}.json"
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        value = _in_subprocess(config, cache, server)
        if place == kept or entry_of(config.task).data_stamp(config) == stamp:
            # no file changed while it was read
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, value)
    return Facts.from_json(value)


def _identity(config: Config, stamp: object) -> Any:
    """All that the facts depend on, as JSON. stamp: of the data and the code."""
    data = config.data.model_dump(mode="json", exclude=set(config.data.indifferent))
    groups = [group.model_dump(mode="json") for group in config.optimizer.groups]
    return [
        samecurve.__version__,
        sorted(Facts.keys()),
        config.task,
        config.engine,
        config.model.model_dump(mode="json"),
        data,
        stamp,
        groups,
    ]


def _in_subprocess(config: Config, cache: Path, server: ForkServer | None) -> dict[str, Any]:
    with (
        shown_progress() as progress,
        TemporaryFile("w+") as request,
        TemporaryFile("w+") as answers,
        TemporaryFile("w+", errors="replace") as log,
    ):
        # a task that is only described needs no GPU
        environment = child_environment(JAX_PLATFORMS="cpu", **{PROGRESS: progress})
        request.write(config.model_dump_json())
        request.seek(0)
        process = start_process(
            Call(__name__, (str(cache),), environment=environment),
            server=server,
            stdin=request.fileno(),
            stdout=answers.fileno(),
            stderr=log.fileno(),
        )
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        answers.seek(0)
        log.seek(0)
        try:
            answer = json.load(answers)
        except ValueError:
            raise _undescribed(code, log.read()) from None
    if "error" in answer:
        kind = UserError if answer["exit_code"] == UserError.exit_code else RunError
        raise kind(**answer["error"])
    facts: dict[str, Any] = answer["facts"]
    return facts


def _undescribed(code: int, stderr: str) -> RunError:
    """The error for a describing process that ended without an answer."""
    from samecurve.diagnose.known_failures import diagnose
    from samecurve.diagnose.tracebacks import clip, last_traceback

    trace = last_traceback(stderr)
    text = stderr.strip()
    frames: list[str] = []
    if trace:
        text = trace.error
        frames = trace.show_frames(_FRAMES)
    diagnosis = diagnose(text)
    if diagnosis:
        return RunError(
            f"describing the model and data: {diagnosis.cause}",
            diagnosis.remedy,
            trace=clip(text.splitlines()[0]),
        )
    return RunError(
        f"describing the model and data failed (exit {code})",
        "the lines above say where",
        trace="\n".join([*frames, *map(clip, text.splitlines()[-_TEXT_LINES:])]),
    )


def main(cache: str) -> None:
    """Describe the task of the config on standard input, and print the facts as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's file prints goes to stderr, not into the answer
    try:
        config = load_of_run(Document(json.loads(sys.stdin.read())), Tasks()).config
        facts = entry_of(config.task).facts(config, cache)
        answer: dict[str, Any] = {"facts": facts.to_json()}
    except (SamecurveError, OSError) as raised:
        error = raised
        if isinstance(error, OSError):
            remedy = f"is there room in {cache}? SAMECURVE_CACHE names another place"
            error = RunError(f"preparing the data failed: {error}", remedy, cache)
        texts = {name: getattr(error, name) for name in ("cause", "remedy", "where")}
        answer = {"error": texts, "exit_code": error.exit_code}
    print(json.dumps(answer), file=answers, flush=True)
