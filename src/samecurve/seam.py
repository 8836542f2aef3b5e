"""What products, and packages of others, may import of this program: these names, and no others.

A name here keeps its meaning from one minor version to the next; what stands behind it is private.
docs/seam.md lists them with what they are for. Each is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samecurve.checkpoint import CorruptCheckpointError as CorruptCheckpointError
    from samecurve.checkpoint.format import verify_checkpoint as verify_checkpoint
    from samecurve.checkpoint.store import checkpoints as checkpoints
    from samecurve.cli.load_config import load_config as load_config
    from samecurve.cli.options import PATH as PATH
    from samecurve.cli.options import ConfigVerb as ConfigVerb
    from samecurve.cli.options import Verb as Verb
    from samecurve.cli.options import VerbGroup as VerbGroup
    from samecurve.cli.places import at_hand as at_hand
    from samecurve.core.config import Section as Section
    from samecurve.core.config.document import Document as Document
    from samecurve.core.config.document import dump_document as dump_document
    from samecurve.core.config.document import join_key as join_key
    from samecurve.core.config.document import parse_document as parse_document
    from samecurve.core.config.document import parse_setting as parse_setting
    from samecurve.core.config.document import read_document as read_document
    from samecurve.core.config.document import suggest as suggest
    from samecurve.core.config.loading import LoadedConfig as LoadedConfig
    from samecurve.core.config.loading import load_document as load_document
    from samecurve.core.config.sections import Config as Config
    from samecurve.core.config.sections import DataSection as DataSection
    from samecurve.core.config.sections import Devices as Devices
    from samecurve.core.determinism import Mean as Mean
    from samecurve.core.determinism.data_order import Ids as Ids
    from samecurve.core.events import Event as Event
    from samecurve.core.planning.facts import Facts as Facts
    from samecurve.core.planning.machine import Device as Device
    from samecurve.core.planning.machine import Machine as Machine
    from samecurve.core.planning.machine import choose_devices as choose_devices
    from samecurve.core.planning.plan import Plan as Plan
    from samecurve.core.protocols import Arrays as Arrays
    from samecurve.core.protocols import Initial as Initial
    from samecurve.core.protocols import Part as Part
    from samecurve.core.protocols import Picture as Picture
    from samecurve.core.protocols import Source as Source
    from samecurve.core.sample_numbers import SampleNumbers as SampleNumbers
    from samecurve.core.sample_numbers import rng as rng
    from samecurve.core.strategies import strategies_of as strategies_of
    from samecurve.core.system import explain_os_error as explain_os_error
    from samecurve.core.system import read_file_bytes as read_file_bytes
    from samecurve.core.system import regular_only as regular_only
    from samecurve.core.system import write_json as write_json
    from samecurve.core.system import write_whole as write_whole
    from samecurve.core.system.cache import cache_entry as cache_entry
    from samecurve.core.system.cache import cache_home as cache_home
    from samecurve.core.system.cache import cache_key as cache_key
    from samecurve.core.system.cache import stamp_file as stamp_file
    from samecurve.core.system.installation import checkout as checkout
    from samecurve.core.system.installation import install_command as install_command
    from samecurve.data import IGNORED as IGNORED
    from samecurve.errors import InvalidConfigError as InvalidConfigError
    from samecurve.errors import RunError as RunError
    from samecurve.errors import SamecurveError as SamecurveError
    from samecurve.errors import UserError as UserError
    from samecurve.errors import keeping as keeping
    from samecurve.experiments.scratch import scratch as scratch
    from samecurve.observe import event_of as event_of
    from samecurve.observe import read_events as read_events
    from samecurve.observe.plan_text import arithmetic as arithmetic
    from samecurve.observe.plan_text import banner as banner
    from samecurve.observe.text_table import Column as Column
    from samecurve.observe.text_table import table_text as table_text
    from samecurve.probe import probe as probe
    from samecurve.probe.progress import show_progress as show_progress
    from samecurve.processes import Call as Call
    from samecurve.processes import Process as Process
    from samecurve.processes import child_environment as child_environment
    from samecurve.processes import how_ended as how_ended
    from samecurve.processes import python_module as python_module
    from samecurve.processes import signal_group as signal_group
    from samecurve.processes import start_process as start_process
    from samecurve.processes import start_program as start_program
    from samecurve.processes import wait_for as wait_for
    from samecurve.run.describe import describe as describe
    from samecurve.run.directory import Run as Run
    from samecurve.run.directory import is_live as is_live
    from samecurve.run.prepare import make_plan as make_plan
    from samecurve.tasks import TaskEntry as TaskEntry
    from samecurve.tasks import Tasks as Tasks
    from samecurve.tasks import entry_of as entry_of
    from samecurve.terminal import echo as echo
    from samecurve.terminal import printable as printable
    from samecurve.units import counted as counted
    from samecurve.units import join_words as join_words
    from samecurve.units import show_bytes as show_bytes
    from samecurve.units import show_count as show_count
    from samecurve.units import show_seconds as show_seconds
    from samecurve.units import show_time as show_time
    from samecurve.units import some as some
    from samecurve.worker import alone as alone

# the module of each name, by what the names are for
PLACES = {
    # Errors
    "UserError": "samecurve.errors",
    "RunError": "samecurve.errors",
    "SamecurveError": "samecurve.errors",
    "InvalidConfigError": "samecurve.errors",
    "keeping": "samecurve.errors",
    # Words for people
    "counted": "samecurve.units",
    "join_words": "samecurve.units",
    "show_bytes": "samecurve.units",
    "show_count": "samecurve.units",
    "show_seconds": "samecurve.units",
    "show_time": "samecurve.units",
    "some": "samecurve.units",
    "echo": "samecurve.terminal",
    "printable": "samecurve.terminal",
    "Column": "samecurve.observe.text_table",
    "table_text": "samecurve.observe.text_table",
    # Verbs
    "ConfigVerb": "samecurve.cli.options",
    "PATH": "samecurve.cli.options",
    "Verb": "samecurve.cli.options",
    "VerbGroup": "samecurve.cli.options",
    "load_config": "samecurve.cli.load_config",
    "at_hand": "samecurve.cli.places",
    # Configs
    "Section": "samecurve.core.config",
    "Config": "samecurve.core.config.sections",
    "DataSection": "samecurve.core.config.sections",
    "Devices": "samecurve.core.config.sections",
    "Document": "samecurve.core.config.document",
    "dump_document": "samecurve.core.config.document",
    "join_key": "samecurve.core.config.document",
    "parse_document": "samecurve.core.config.document",
    "parse_setting": "samecurve.core.config.document",
    "read_document": "samecurve.core.config.document",
    "suggest": "samecurve.core.config.document",
    "LoadedConfig": "samecurve.core.config.loading",
    "load_document": "samecurve.core.config.loading",
    # Plans and machines
    "Plan": "samecurve.core.planning.plan",
    "Facts": "samecurve.core.planning.facts",
    "Device": "samecurve.core.planning.machine",
    "Machine": "samecurve.core.planning.machine",
    "choose_devices": "samecurve.core.planning.machine",
    "make_plan": "samecurve.run.prepare",
    "describe": "samecurve.run.describe",
    "probe": "samecurve.probe",
    "arithmetic": "samecurve.observe.plan_text",
    "banner": "samecurve.observe.plan_text",
    "strategies_of": "samecurve.core.strategies",
    # Tasks and data
    "Mean": "samecurve.core.determinism",
    "Ids": "samecurve.core.determinism.data_order",
    "Arrays": "samecurve.core.protocols",
    "Initial": "samecurve.core.protocols",
    "Part": "samecurve.core.protocols",
    "Picture": "samecurve.core.protocols",
    "Source": "samecurve.core.protocols",
    "SampleNumbers": "samecurve.core.sample_numbers",
    "rng": "samecurve.core.sample_numbers",
    "TaskEntry": "samecurve.tasks",
    "Tasks": "samecurve.tasks",
    "entry_of": "samecurve.tasks",
    "IGNORED": "samecurve.data",
    "show_progress": "samecurve.probe.progress",
    # Runs
    "Run": "samecurve.run.directory",
    "is_live": "samecurve.run.directory",
    "checkpoints": "samecurve.checkpoint.store",
    "CorruptCheckpointError": "samecurve.checkpoint",
    "verify_checkpoint": "samecurve.checkpoint.format",
    "Event": "samecurve.core.events",
    "event_of": "samecurve.observe",
    "read_events": "samecurve.observe",
    "scratch": "samecurve.experiments.scratch",
    # Files
    "explain_os_error": "samecurve.core.system",
    "read_file_bytes": "samecurve.core.system",
    "regular_only": "samecurve.core.system",
    "write_json": "samecurve.core.system",
    "write_whole": "samecurve.core.system",
    "cache_entry": "samecurve.core.system.cache",
    "cache_home": "samecurve.core.system.cache",
    "cache_key": "samecurve.core.system.cache",
    "stamp_file": "samecurve.core.system.cache",
    "checkout": "samecurve.core.system.installation",
    "install_command": "samecurve.core.system.installation",
    # Processes
    "Call": "samecurve.processes",
    "Process": "samecurve.processes",
    "child_environment": "samecurve.processes",
    "how_ended": "samecurve.processes",
    "python_module": "samecurve.processes",
    "signal_group": "samecurve.processes",
    "start_process": "samecurve.processes",
    "start_program": "samecurve.processes",
    "wait_for": "samecurve.processes",
    "alone": "samecurve.worker",
}


def __getattr__(name: str) -> Any:
    """A name of the seam, kept once it is imported."""
    if name not in PLACES:
        raise AttributeError(f"the seam has no {name!r}")
    value = globals()[name] = getattr(import_module(PLACES[name]), name)
    return value
