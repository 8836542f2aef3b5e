"""Tiny pipelines that the tests of this folder read."""

from collections.abc import Mapping
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline of each family, as diffusers saves it."""
    import tiny_pipelines  # and with it torch and diffusers

    root = tmp_path_factory.mktemp("pipelines")
    return {
        name: getattr(tiny_pipelines, f"save_{name}")(root / name) for name in tiny_pipelines.ALL
    }


@pytest.fixture(scope="session")
def files(homes: Mapping[str, Path]) -> dict[str, Path]:
    """Two of these pipelines as one file each, in the layout of the models' authors."""
    import original_files

    return {
        name: original_files.save_original(
            homes[name], homes[name].with_suffix(".safetensors"), attended_ups=ups
        )
        for name, ups in original_files.OF_ONE_FILE.items()
    }
