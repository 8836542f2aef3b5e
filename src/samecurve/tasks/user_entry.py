"""The entry of a task that is a class in a user's file."""

from dataclasses import dataclass
from pathlib import Path

from samecurve.core.config.sections import Config
from samecurve.tasks.entry import TaskEntry
from samecurve.tasks.user_class import Place, is_pickled
from samecurve.tasks.user_class.class_source import check_class_exists, declares_for_launcher
from samecurve.tasks.user_class.load_class import load_class
from samecurve.tasks.user_class.local_imports import local_files


@dataclass(frozen=True, kw_only=True)
class UserFile(TaskEntry):
    """The entry of a user's file: one class, for the engine of the config."""

    place: Place

    def class_of(self, engine: str) -> type:
        """The file's class, whatever the engine."""
        del engine
        return load_class(self.place)

    def launcher_class(self) -> type | None:
        return load_class(self.place) if declares_for_launcher(self.place) else None

    def data_stamp(self, config: Config) -> object:
        check_class_exists(self.place)
        return super().data_stamp(config)

    def file_of(self, task_class: type) -> Path:
        del task_class  # it may be another file's, which the user's file imports
        return self.place.path

    def _source_files(self) -> list[Path]:
        """The class's file, and the modules beside it that it imports."""
        if is_pickled(self.place.path):
            return [self.place.path]
        try:
            local = local_files(self.place)
        except OSError:  # what reads the file says so
            return [self.place.path]
        return [local.root / name for name in sorted(local.sources)]
