"""The command answers at once: nothing heavy is imported before it is needed."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from click.testing import CliRunner

from commands import command, refused, samecurve, write_config
from samecurve.cli.main import VERBS, all_verbs, cli, find_verb, main
from samecurve.cli.options import CONFIG_OPTIONS, HELP_GROUPS
from samecurve.cli.train import _torch_silent
from samecurve.cli.unknown_arguments import TRAINER_FLAGS
from samecurve.core.config import flatten
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.tasks import Tasks


def quickest(arguments: list[str], cwd: Path) -> float:
    """Seconds of a core that the quickest of five took: other processes share the cores, so that a
    clock would measure them too. Without what the command starts ahead, and ends.
    """
    program = (
        "import sys, time\nfrom samecurve.cli.main import main\n"
        f"sys.argv = ['samecurve', *{arguments!r}]\n"
        "try: main()\nfinally: print(time.process_time())"
    )
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False
        )
        times.append(float(done.stdout.splitlines()[-1]))
    return min(times)


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["greeting", "help"])
def test_the_first_screen_is_quick_and_imports_nothing_heavy(
    arguments: list[str], tmp_path: Path
) -> None:
    program = (
        f"import sys, samecurve.cli.main; sys.argv = ['samecurve', *{arguments!r}]\ntry:"
        " samecurve.cli.main.main()\nfinally: print(sorted(m for m in ('torch', 'numpy',"
        " 'pydantic', 'rich') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "train" in done.stdout
    assert quickest(arguments, tmp_path) < 0.2


def test_a_config_error_is_quick_and_imports_no_torch(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    arguments = ["train", "-f", str(config), "--set", "model.hiden_size=3"]
    program = (
        f"import sys, samecurve.cli.main; sys.argv = ['samecurve', *{arguments!r}]\ntry:"
        " samecurve.cli.main.main()\nfinally: print(sorted(m for m in ('torch', 'numpy') if m in"
        " sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    assert "did you mean hidden_size?" in done.stderr
    assert quickest(arguments, tmp_path) < 0.5


def test_a_rank_alone_imports_nothing_of_several(tmp_path: Path, corpus: Path) -> None:
    """Nor of compilers: either takes as long as all of torch."""
    arguments = ["train", "-f", str(write_config(tmp_path, corpus))]
    arguments += ["--devices", "cpu:1", "--max-steps", "2", "--exact"]
    slow = ("sympy", "torch._dynamo", "torch.distributed.tensor")
    program = (
        f"import sys, samecurve.cli.main; sys.argv = ['samecurve', *{arguments!r}]\ntry:"
        " samecurve.cli.main.main()\nfinally: print('torch' in sys.modules,"
        f" sorted({{*{slow!r}}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True []")


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("trian", "there is no verb trian; did you mean train?"),
        ("compare_run", "there is no verb compare_run; did you mean compare-runs?"),
        ("hallo", "there is no verb hallo; here: audit, bench, check, "),
    ],
)
def test_a_verb_that_is_not_there(
    verb: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert says in refused(monkeypatch, capsys, verb, cwd=tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train a.yaml --lr 1", ("a.yaml stands alone", "samecurve train -f a.yaml --lr 1")),
        ("plan --lr 1 a.yaml", ("a.yaml stands alone", "samecurve plan --lr 1 -f a.yaml")),
        ("queue add a.yaml", ("a.yaml stands alone", "samecurve queue add -f a.yaml")),
        ("a.json", ("a.json stands alone", "samecurve train -f a.json")),
        ("train -f a.yaml b.yaml", ("b.yaml is a second config", "give one")),
        ("plan --file=a.yaml b.yaml", ("b.yaml is a second config", "give one")),
        ("train -d x.txt y.json", ("y.json belongs to no flag", "one file, folder or pattern")),
        ("train --lr-scheduler-type constant_with_warmup", ("Trainer", "schedule.decay=constant")),
        ("verify fast", ("fast belongs to no flag", "samecurve verify --help`")),
        ("train --per_device_train_batch_size 4", ("of Hugging Face's", "--batch-size 4")),
        ("train --gradient-accumulation-steps=2", ("of Hugging Face's", "--grad-accum 2")),
        ("plan --num-train-epochs 3", ("of Hugging Face's Trainer", "--epochs 3")),
        ("bench --learning-rate 1e-3", ("of Hugging Face's Trainer", "--lr 1e-3")),
        ("train --learning-rate", ("of Hugging Face's Trainer", "--lr VALUE")),
        ("plan -f none.yaml", ("batch: missing", "`batch: {samples: 32}`")),
        ("plan -f none.yaml --set optimizer.groups=[{}]", ("match: missing", "`match: VALUE`")),
    ],
)
def test_a_first_try_is_refused_with_the_line_to_type(
    line: str,
    says: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "none.yaml").write_text("train: {steps: 3}\n")
    said = refused(monkeypatch, capsys, *line.split(), cwd=tmp_path)
    cause, remedy = says
    assert cause in said
    assert remedy in said.partition(cause)[2]


def test_each_flag_that_stands_for_one_of_the_trainer_is_taken() -> None:
    """What is proposed is a flag of every verb that reads a config, or a key of the config."""
    names = {name for option in CONFIG_OPTIONS for name in option.opts}
    keys = set(flatten(load_document(Document({"batch": {"samples": 1}}), Tasks()).config))
    for proposed in TRAINER_FLAGS.values():
        flag, _, value = proposed.partition(" ")
        assert flag in names | {"--save-dir"}
        assert flag != "--set" or value.partition("=")[0] in keys


@pytest.mark.parametrize("verb", ["queue", "data", "submit"])
def test_a_group_of_verbs_alone_shows_its_help_and_cuts_no_sentence(verb: str) -> None:
    done = CliRunner().invoke(cli, verb.split())
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")
    assert "..." not in done.output.partition("COMMAND [ARGS]...")[2]
    assert done.output == CliRunner().invoke(cli, [*verb.split(), "--help"]).output


def test_help_lists_each_verb_once_below_the_title_of_its_group() -> None:
    """A verb that names no title would stand below "More"; no line is wider than 80 columns."""
    _, *blocks = CliRunner().invoke(cli, ["--help"]).output.split("\n\n")
    listed = {block.partition(":\n")[0]: block.splitlines()[1:] for block in blocks}
    assert [title for title in listed if title in HELP_GROUPS] == list(HELP_GROUPS)
    assert "More" not in listed
    verbs = [line.split()[0] for title in HELP_GROUPS for line in listed[title]]
    assert sorted(verbs) == all_verbs()
    assert [line.split()[0] for line in listed["Train"]] == ["plan", "run", "train", "verify"]
    assert max(len(line) for lines in listed.values() for line in lines) < 80


def test_what_nobody_expected_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("samecurve.cli.schema"), "echo", None)
    monkeypatch.setattr(sys, "argv", ["samecurve", "schema"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):" in said
    assert "\nerror: TypeError: 'NoneType' object is not callable\n" in said
    assert said.splitlines()[-1].startswith("  remedy: no line of your own led there")
    assert "report it" in said.splitlines()[-1]


def test_the_page_of_commands_has_each_verb_below_the_title_that_help_has() -> None:
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    titles: dict[str, str] = {}
    for section in page.split("\n## ")[1:]:
        verbs = re.findall(r"^\| \[`samecurve ([\w-]+)", section, re.MULTILINE)
        titles |= dict.fromkeys(verbs, section.partition("\n")[0])
    assert titles == {verb: vars(find_verb(verb))["help_group"] for verb in all_verbs()}
    assert list(VERBS) == sorted(VERBS)


@pytest.mark.parametrize(
    ("before", "verb", "after"),
    [
        ({}, "schema", {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}),
        ({"OMP_WAIT_POLICY": "active"}, "schema", {"OMP_WAIT_POLICY": "active"}),  # the user's own
        ({"GOMP_SPINCOUNT": "9"}, "schema", {"GOMP_SPINCOUNT": "9"}),
        ({}, "run", {}),
    ],
)
def test_idle_threads_soon_sleep(
    before: dict[str, str], verb: str, after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other programs they would spin; what a script's do is its own matter."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, before.get(name, ""))  # restored afterwards, set or not
        if name not in before:
            monkeypatch.delenv(name)
    CliRunner().invoke(cli, [verb, "--no-such-flag"])
    assert {name: os.environ[name] for name in names if name in os.environ} == after


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_help_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    """Each line ends with a whole word, as in the help of a wide terminal."""
    arguments = command("verify", "--help")
    terminal = pexpect.spawn(
        arguments[0],
        arguments[1:],
        cwd=str(tmp_path),
        dimensions=(30, columns),
        encoding="utf-8",
    )
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert terminal.before is not None
    lines = terminal.before.splitlines()
    assert max(map(len, lines)) <= columns
    wide = samecurve("verify", "--help", cwd=tmp_path).stdout
    assert " ".join(lines).split()[4:] == wide.split()[4:]  # what follows the program's name


@pytest.mark.parametrize("machine", [(), ("--machine", "2xH100")])
def test_a_plan_shows_where_keys_come_from_where_asked(
    machine: tuple[str, ...], tmp_path: Path, corpus: Path
) -> None:
    line = ("plan", "-f", write_config(tmp_path, corpus), "--lr", "0.5", *machine)
    short = samecurve(*line, cwd=tmp_path).stdout.splitlines()
    whole = samecurve(*line, "--keys", cwd=tmp_path).stdout.splitlines()
    head, rows = whole[: len(short) - 1], whole[len(short) :]
    assert head == short[:-1]
    assert short[-1] == f"--keys: where each of the {len(rows)} config keys comes from"
    assert rows[0].split() == ["task", "default", "language"]
    assert ["optimizer.lr", "--lr", "0.5"] in [row.split() for row in rows]


def test_an_import_that_fails_leaves_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would inherit it, and their logs would lack torch's warnings."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    with pytest.raises(ImportError), _torch_silent():
        raise ImportError
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
