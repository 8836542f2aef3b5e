"""How the answers are shown: numbered lines, JSON, and a block for a bug report."""

import json
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from samecurve.seam import counted
from samecurve_products.doctor import Check
from samecurve_products.report.redact import HIDDEN, names_secret, redact

_NAME_WIDTH = 17
_INDENT = " " * 11
# the beginnings of variables that change what libraries and drivers do
_MATTERING = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|RCCL|HIP|ROCR|ROCM|HSA|AMD|MIOPEN|GPU|GLOO|TP|TORCH"
    r"|TORCHINDUCTOR|TORCHELASTIC|PYTORCH|XLA|JAX|TPU|OMP|GOMP|KMP|MKL|OPENBLAS|MALLOC"
    r"|SAMECURVE|HF|HUGGINGFACE|TRANSFORMERS|WANDB|SLURM|PBS|LSB|RAY)_"
    r"|(LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|CONDA_PREFIX"
    r"|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE)\Z"
)
# of schedulers: names of people, accounts and machines, which a report does not need
_PERSONAL = re.compile(
    r"(USER|ACCOUNT|NODELIST|HOST|SUBMIT|ADDR|NAME|PATH_TO|GROUP)", re.IGNORECASE
)


def line_of(number: int, check: Check) -> str:
    """A numbered line, with the figure's further lines and the remedy below it."""
    first, *more = check.figure.split("\n")
    lines = [f"{number:>3} {check.status}   {check.name:<{_NAME_WIDTH}} {first}"]
    if more:  # a picture: all its lines begin at one column
        lines = [f"{number:>3} {check.status}   {check.name}"]
        lines += [f"{_INDENT}{line}" for line in (first, *more)]
    if check.remedy:
        lines.append(f"{_INDENT}remedy: {check.remedy}")
    return "\n".join(lines)


def summary_of(checks: Sequence[Check]) -> str:
    """'19 checks: 17 PASS, 2 WARN, 0 FAIL'."""
    counts = [
        f"{sum(check.status == status for check in checks)} {status}"
        for status in ("PASS", "WARN", "FAIL")
    ]
    return f"{counted(len(checks), 'check')}: {', '.join(counts)}"


def json_of(checks: Iterable[Check]) -> str:
    return json.dumps({"checks": [asdict(check) for check in checks]}, indent=1)


def report_of(
    checks: Sequence[Check],
    environment: Mapping[str, str],
    *,
    home: Path,
    logs: Sequence[str] = (),
) -> str:
    """The block for a bug report, without secrets, the host's name and the user's.

    home: the user's directory, which is written as ~
    logs: what ranks printed whose collectives failed
    """
    # checks that name the host or the user's places tell nothing else that a report needs
    kept = [check for check in checks if check.name != "host name" or check.status != "PASS"]
    lines = [
        "```",
        f"samecurve check, {time.strftime('%Y-%m-%d', time.gmtime())}",
        f"system: {platform.platform()}",
        "",
        *(line_of(number, check) for number, check in enumerate(kept, 1)),
        "",
        summary_of(kept),
        "",
        "environment:",
        *_variables(environment),
        *(["", "output of the ranks:", *(f"  {line}" for line in logs)] if logs else []),
        "```",
    ]
    text = redact("\n".join(lines))
    for name, word in ((str(home), "~"), (platform.node(), "HOST")):
        if len(name) > 3:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", word, text)
    return text


def _variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that matter, a line each. Secrets are hidden by name and by form."""
    shown = [
        f"  {name}={HIDDEN if names_secret(name) and value else redact(value)}"
        for name, value in sorted(environment.items())
        if _MATTERING.match(name) and not _is_personal(name)
    ]
    return shown or ["  (no variable that matters is set)"]


def _is_personal(name: str) -> bool:
    is_of_scheduler = name.startswith(("SLURM_", "PBS_", "LSB_", "RAY_"))
    return is_of_scheduler and bool(_PERSONAL.search(name))
