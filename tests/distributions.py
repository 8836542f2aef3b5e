"""What the wheel and the sdist hold: `make dist` checks both; nothing more, nothing less.

The sdist has the repository's files, without what only the repository's host reads. The wheel has
the package, and what `samecurve examples` writes.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_THE_HOST = (".ci/", ".github/", ".git-blame-ignore-revs")
PLACES = {  # of the repository -> of the wheel
    "src/samecurve/": "samecurve/",
    "src/samecurve_products/": "samecurve_products/",
    "models/": "samecurve/shipped/models/",
    "examples/": "samecurve/shipped/examples/",
    "docs/config.schema.json": "samecurve/shipped/docs/config.schema.json",
}
LICENCES = ("LICENSE", "src/samecurve_products/report/page/uplot/LICENSE")


def faults_of(directory: Path) -> list[str]:
    """What is wrong with the one wheel and the one sdist in a directory."""
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    source = {name.partition("/")[2] for name in names} - {"PKG-INFO"}
    with zipfile.ZipFile(wheel) as archive:
        package = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    expected = {
        place + name.removeprefix(origin)
        for name in source
        for origin, place in PLACES.items()
        if name.startswith(origin)
    }
    faults = differences(wheel.name, package, expected)
    committed = tracked_files()
    if committed is not None:
        faults += differences(sdist.name, source, committed)
    faults += [f"{sdist.name} lacks {name}" for name in LICENCES if name not in source]
    if "licenses/LICENSE" not in about:
        faults.append(f"{wheel.name} lacks the licence")
    return faults


def differences(name: str, found: set[str], expected: set[str]) -> list[str]:
    """A line for each file that is missing or too many."""
    return [
        *(f"{name} lacks {file}" for file in sorted(expected - found)),
        *(f"{name} has {file}, which does not belong there" for file in sorted(found - expected)),
    ]


def tracked_files() -> set[str] | None:
    """The repository's files that an sdist has. None: this is no repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if listed.returncode:
        return None
    return {name for name in listed.stdout.splitlines() if not name.startswith(OF_THE_HOST)}


if __name__ == "__main__":
    found = faults_of(Path(sys.argv[1]))
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    sys.exit(bool(found))
