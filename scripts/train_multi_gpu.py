"""Train a config on several GPUs: the lines of OneTrainer's guide, typed as they stand there.

python scripts/train_multi_gpu.py --config-path=your_config.json --num-gpus=2
    --distributed-backend=nccl
python scripts/train_multi_gpu.py --config-path your_config.json --num-gpus 0 --spawn --port 29500
    --distributed-data-loading
torchrun --nproc_per_node=2 scripts/train_multi_gpu.py --config-path=your_config.json

The config is OneTrainer's JSON, or one of any other tool that `samecurve convert` reads, or one of
Samecurve's. Without a flag that says which devices, all visible GPUs are taken. Flags are those of
`samecurve train`.
"""

from samecurve.cli.standalone import run_on_all_gpus

if __name__ == "__main__":
    run_on_all_gpus()
