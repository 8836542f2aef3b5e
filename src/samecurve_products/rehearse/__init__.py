"""`samecurve rehearse`: some steps of a run on emulated GPUs, before a machine with GPUs is paid.

`verb.py` is the command line, `config_rehearsal.py` trains a config, `script_rehearsal.py` runs
any command, `report_files.py` reads what was found, `rehearsal.py` holds the result and
`rehearsal_text.py` shows it. Beside `emulator.py`, the files that run in the rehearsed process know
the emulator: `start/` brings it in, `step_watch.py` reads its counts.
"""
