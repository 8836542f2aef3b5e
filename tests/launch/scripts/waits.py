"""A plain gloo script.

After some steps its second rank goes wrong: sleep, stop, few (it leaves, as if its data had ended),
shapes (a sum of another shape than the others'); behind (it stays when the first has left).
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
rank = dist.get_rank()
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for _step in range(30):
    wrong = rank == 1 and _step == 20 and not again
    if wrong and how == "sleep":
        time.sleep(1000)
    if wrong and how == "few":
        dist.destroy_process_group()  # without it torch aborts the process now and then as it ends
        sys.exit()
    if wrong and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    value = torch.ones(7 if wrong and how == "shapes" else 10)
    dist.all_reduce(value)
    time.sleep(0.02)
if how == "behind" and rank == 1:
    time.sleep(1000)
print(f"rank {rank} summed {value[0].item():g}", flush=True)
dist.destroy_process_group()
