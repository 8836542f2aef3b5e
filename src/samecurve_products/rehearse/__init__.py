"""`samecurve rehearse`: some steps of a run on emulated GPUs, before a machine with GPUs is paid.

`verb.py` is the command line, `config_rehearsal.py` trains a config, `script_rehearsal.py` runs
any command, `report_files.py` reads what was found, `rehearsal.py` holds the result and
`rehearsal_text.py` shows it. `emulated_cuda/` is the emulator, of which `emulator.py` alone knows.
"""
