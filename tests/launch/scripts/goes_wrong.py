"""Goes wrong in the way, and on the rank, that its arguments say; the others sleep."""

import os
import signal
import subprocess
import sys
import threading
import time

how, where = sys.argv[1], sys.argv[2]
rank = os.environ["RANK"]
print(f"here {rank}", flush=True)
if how == "child":
    print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if how == "loader":
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            print("worker", os.getpid(), flush=True)
            time.sleep(600)

    next(iter(DataLoader(Slow(), num_workers=1)))
if how == "saving":
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print(f"saved {rank}", flush=True)
        sys.exit(0)
if how == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"deaf {rank}", flush=True)
if rank == where:
    if how == "raise":
        raise ValueError("a planted fault")
    if how == "import":
        import nowhere_to_be_found  # noqa: F401
    if how == "exit":
        sys.exit(3)
    if how == "text":
        sys.exit("a planted word")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "hanging":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("a planted fault")
    if how == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("a planted fault")
if how != "once":
    time.sleep(600)
print("port", os.environ["MASTER_PORT"])
