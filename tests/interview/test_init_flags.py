"""`samecurve init` by its flags alone, and what it does where nobody can be asked."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import nvml
from commands import refused, samecurve
from samecurve.core.config.document import dump_document, parse_document, read_document
from samecurve.core.config.json_schema import json_schema
from samecurve.errors import UserError
from samecurve.tasks import Tasks
from samecurve_products.init.answers import Answers
from samecurve_products.init.interview import NEEDED, interview, missing_flags
from samecurve_products.init.new_files import schema_line, write_files
from samecurve_products.init.planned import preset_document
from samecurve_products.init.presets import all_presets

ROOT = Path(__file__).parents[2]
GIVEN = {
    "--devices": "cpu:2",
    "--preset": "small-language-model",
    "--data": "squares.txt",
    "--batch": "10",
    "--scale-lr": "none",
    "--launcher": "samecurve",
}
# before the command line itself
ON_GPUS = f"""{nvml.ENGINES}
import sys
from samecurve.cli.main import main
main()
"""


@pytest.fixture
def home(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "squares.txt").write_text(corpus.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()} - {"squares.txt"}


def test_without_a_terminal_the_flags_are_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "init", "--devices", "cpu", "--data", "x", cwd=home)
    assert "  --preset    the config to begin from   (missing)\n" in said
    assert "  --devices   auto, indices such as 0,1, or cpu:2\n" in said
    assert "no terminal to ask on, and these are not answered: --task, --preset, --batch" in said
    assert "--yes, which takes the defaults" in said
    assert names(home) == set()


def test_what_is_needed_follows_what_is_given() -> None:
    assert missing_flags({}) == list(NEEDED)
    assert missing_flags(GIVEN) == []
    assert missing_flags({**GIVEN, "--preset": "chat-24gb"}) == ["--model"]
    assert missing_flags({"--task": "new.py"}) == []
    assert missing_flags({"--task": "new.py:Mine"}) == [
        *("--devices", "--batch", "--scale-lr", "--launcher")
    ]


def test_all_flags_ask_nothing_and_the_line_stands(home: Path) -> None:
    words = [word for pair in GIVEN.items() for word in pair]
    done = samecurve("init", *words, cwd=home)
    assert "[" not in done.stdout.replace("[AMD", "")
    written = ["wrote  small-language-model.yaml", "wrote  config.schema.json"]
    assert done.stdout.splitlines()[-3:-1] == written
    assert done.stdout.splitlines()[-1].endswith("train -f small-language-model.yaml")
    document = read_document(home / "small-language-model.yaml")
    assert document.value["devices"] == {"use": "cpu:2"}
    assert document.value["data"]["source"] == "squares.txt"
    schema = (home / "config.schema.json").read_text()
    assert Draft202012Validator(parse_document(schema, "s.json").value).is_valid(document.value)


def test_yes_takes_the_defaults(home: Path) -> None:
    by_flag = {flag: GIVEN[flag] for flag in ("--data", "--preset")}
    by_flag["--set"] = "train.steps=7 'data.prompts=[a b]'"
    written = interview(Answers(by_flag, asks=False), schema=False)
    assert written.files == [Path("small-language-model.yaml")]
    assert read_document(home / "small-language-model.yaml").value["batch"] == {"samples": 32}
    config = read_document(home / "small-language-model.yaml").value
    assert (config["train"]["steps"], config["data"]["prompts"]) == (7, ["a b"])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"--devices": "cuda"}, "neither auto, all, cpu"),
        ({"--preset": "tiny"}, "'tiny' is no preset"),
        ({"--task": "vision"}, "preset small-language-model is of task language"),
        ({"--data": "nowhere.txt"}, "nowhere.txt"),
        ({"--preset": "chat-24gb", "--model": "nowhere"}, "there is no nowhere"),
        ({"--preset": "picture-lora", "--model": "none"}, "it needs a model"),
        ({"--preset": "picture-classes", "--data": "example"}, "it needs data of your own"),
        ({"--batch": "-3"}, "batch.samples: should be greater than 0"),
        ({"--scale-lr": "cubic"}, "schedule.scale_lr: 'cubic' is not one of"),
        ({"--scale-lr": "linear", "--base-batch": "x"}, "schedule.base_batch"),
        ({"--launcher": "mpirun"}, "'mpirun' is no launcher"),
        ({"--base-batch": "32"}, "--base-batch says nothing where"),
        ({"--set": "train.stps=3"}, "train.stps: unknown key"),
        ({"--set": "batch.samples=3"}, "--set batch.samples: --batch says it"),
        ({"--set": "train.steps"}, "not KEY=VALUE"),
        ({"FILE": "c.json"}, "a config is YAML"),
        ({"FILE": "there.yaml"}, "there.yaml exists"),
        ({"--task": "new.py", "--preset": "digits"}, "of task vision, and --task says new.py"),
        ({"FILE": "no/c.yaml"}, "there is no directory no"),
    ],
)
def test_a_wrong_flag_ends_it_with_its_remedy(
    home: Path, change: dict[str, str], cause: str
) -> None:
    (home / "there.yaml").write_text("old\n")
    with pytest.raises(UserError) as refusal:
        interview(Answers({**GIVEN, **change}, asks=False), schema=True)
    assert cause in str(refusal.value)
    assert "remedy: " in str(refusal.value)
    assert names(home) == {"there.yaml"}
    assert (home / "there.yaml").read_text() == "old\n"


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        ("random.py", "would hide the module random"),
        ("numpy.py", "would hide the module numpy"),
        ("3d.py", "no name of a Python module"),
        ("class.py", "no name of a Python module"),
        ("../x.py", "lies outside of this directory"),
        ("mine.py", "mine.py exists, and is never written over"),
        ("no/x.py", "there is no directory"),
        ("other.py", "other.yaml exists"),
        ("third.py", "test_third.py exists"),
    ],
)
def test_a_new_task_hides_nothing(home: Path, task: str, cause: str) -> None:
    for name in ("mine.py", "other.yaml", "test_third.py"):
        (home / name).touch()
    with pytest.raises(UserError, match=cause):
        interview(Answers({"--task": task}, asks=False), schema=True)
    assert names(home) == {"mine.py", "other.yaml", "test_third.py"}


def test_flags_that_say_nothing_about_a_new_task_are_refused(home: Path) -> None:
    for flag in ("--data", "--scale-lr"):
        with pytest.raises(UserError, match=f"{flag} says nothing about the new task"):
            interview(Answers({"--task": "new.py", flag: "x"}, asks=False), schema=True)
    assert names(home) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a directory read-only")
def test_a_directory_that_takes_no_files_is_refused_before_any_question(home: Path) -> None:
    mount = "mkdir ro && mount --bind ro ro && mount -o remount,ro,bind ro && exec"
    init = shlex.join([sys.executable, "-m", "samecurve", "init", "ro/c.yaml", "--yes"])
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} {init}"],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error: FILE: ro: its file system is read-only" in done.stderr
    assert "mount it writable again, and give the name again; or another name" in done.stderr
    assert done.stdout == ""
    assert names(home) == {"ro"}


def test_files_are_written_all_or_none(home: Path) -> None:
    (home / "b").touch()
    with pytest.raises(UserError, match="b: it exists already"):
        write_files({home / "a": "1", home / "b": "2"})
    assert names(home) == {"b"}
    write_files({home / "a": "1", home / "b": "2"}, replaced=[home / "b"])
    assert (home / "b").read_text() == "2"


def test_a_config_in_the_checkout_names_its_schema() -> None:
    assert schema_line(ROOT / "models/new.yaml").endswith("$schema=../docs/config.schema.json\n")
    assert schema_line(Path("/elsewhere/new.yaml")).endswith("$schema=config.schema.json\n")


def test_every_preset_is_valid_and_its_needs_can_be_asked_for() -> None:
    schema = Draft202012Validator(json_schema(Tasks()))
    for preset in all_presets().values():
        values = dict.fromkeys(("data.source", "model.path"), ("given", "flag"))
        document = preset_document(preset, values if preset.needs else {})
        assert [error.message for error in schema.iter_errors(document.value)] == []
        assert (
            parse_document(dump_document(document.value, compact=True), "c.yaml").value
            == document.value
        )
        if preset.needs:
            with pytest.raises(UserError, match="it needs"):
                preset_document(preset, {})


def test_on_gpus_a_preset_that_does_not_fit_says_so(home: Path) -> None:
    nvml.library(home)
    nvml.write_gpus(home / "gpus", [nvml.Gpu(name="NVIDIA GeForce GTX 1050", memory=2 << 30)] * 2)
    done = subprocess.run(
        [
            *(sys.executable, "-c", ON_GPUS, "init", "--yes", "small.yaml"),
            *("--task", "language", "--data", "squares.txt"),
        ],
        cwd=home,
        env={**os.environ, "LD_LIBRARY_PATH": str(home), "NVML_GPUS": "gpus"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    assert "Detected 2 GPUs: NVIDIA GeForce GTX 1050" in shown
    assert "2 devices: cuda:0 (NVIDIA GeForce GTX 1050), cuda:1" in shown
    assert "fits: " in shown.partition("gpt2-class")[0]
    assert "refused with these answers:" in shown.partition("gpt2-class")[2]
    assert "devices" not in read_document(home / "small.yaml").value
