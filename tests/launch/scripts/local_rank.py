"""As written for torch.distributed.launch: the rank comes as an option."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()
print(f"local rank {options.local_rank}, lr {options.lr}")
