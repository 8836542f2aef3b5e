"""Known failures that the code that is trained has made, compiled or not."""

from samecurve.diagnose.known_failures.entry import known

_UNUSED = r"Expected to have finished reduction in the prior iteration"
_COLLECTIVE = (
    r"is running collective: CollectiveFingerPrint\((?:SequenceNumber=\d+,"
    r" )?OpType=(?P<{0}>\w+)(?:, TensorShape=(?P<{0}_of>\[[^\]]*\]))?"
)

COMPILING = (
    known(
        "too many shapes",
        patterns=(r"FailOnRecompileLimitHit",),
        cause="train.compile: the model is called with ever other shapes, and each is compiled",
        remedy="samples of a few lengths (pad them), or leave --compile out",
    ),
    known(
        "no C++ compiler",
        patterns=(r"InvalidCxxCompiler: (?P<what>[^\n]{0,160})",),
        cause="to compile a model for a CPU, torch needs a C++ compiler: {what}",
        remedy="install g++ (CXX names another), or leave --compile out",
    ),
    known(
        "no triton",
        patterns=(
            r"TritonMissing",
            r"Cannot find a working triton installation",
        ),
        cause="to compile a model for a GPU, torch needs triton, which was not found",
        remedy="a torch wheel for CUDA brings it (pip install triton), or leave --compile out",
    ),
)

USER_CODE = (
    known(
        "unused parameters",
        patterns=(
            _UNUSED + r"[\s\S]*?Parameter(?:s| indices) which did not receive grad for rank \d+:"
            r" (?P<which>[^\n]{1,150})",
            _UNUSED,
        ),
        cause="parameters had no part in the loss, and DDP waits for their gradients: {which}",
        remedy=(
            "DistributedDataParallel(..., find_unused_parameters=True), or requires_grad_(False)"
            " for them; TORCH_DISTRIBUTED_DEBUG=INFO gives names instead of numbers"
        ),
    ),
    known(
        "gradient ready twice",
        patterns=(r"Expected to mark a variable ready only once",),
        cause="a parameter's gradient was ready twice in one backward",
        remedy=(
            "checkpoint(..., use_reentrant=False); one forward through DDP for each backward; or"
            " static_graph=True"
        ),
    ),
    known(
        "graph used twice",
        patterns=(r"Trying to backward through the graph a second time",),
        cause="a tensor with its graph was kept, and a second backward goes through that graph",
        remedy=(
            "compute it anew for each backward (in each phase and microbatch; where no gradient is"
            " wanted, under torch.no_grad() or with .detach()), and keep none on self"
        ),
    ),
    known(
        "models differ",
        patterns=(
            r"DDP expects same model across all ranks, but Rank (?P<one>\d+) has (?P<count>\d+)"
            r" params,"
            r" while rank (?P<other>\d+) has inconsistent (?P<inconsistent>\d+) params",
        ),
        cause=(
            "the ranks have different models: {count} parameters on rank {one}, {inconsistent} on"
            " rank {other}"
        ),
        remedy=(
            "build the model from the same config and data on every rank, by nothing that depends"
            " on the rank"
        ),
    ),
    known(
        "model shapes differ",
        patterns=(
            r"params\[(?P<index>\d+)\] in this process with (?P<what>sizes|strides)"
            r" (?P<own>\[[^\]]*\])"
            r" appears not to match",
        ),
        cause=(
            "the ranks have different models: parameter {index} has {what} {own} here and others on"
            " rank 0"
        ),
        remedy=(
            "build the model from the same config and data on every rank (a vocabulary or classes"
            " counted from a shard differ)"
        ),
    ),
    known(
        "collectives differ",
        patterns=(
            r"Rank (?P<one>\d+) "
            + _COLLECTIVE.format("first")
            + r"[\s\S]*?Rank (?P<other>\d+) "
            + _COLLECTIVE.format("second"),
            r"Detected mismatch between collectives on ranks",
        ),
        cause=(
            "the ranks called different collectives: rank {one} {first}{first_of}, rank {other}"
            " {second}{second_of}"
        ),
        remedy=(
            "every rank makes the same calls, in the same order, with the same shapes: pad, or"
            " drop_last=True; no `if rank == 0` around one"
        ),
    ),
    known(
        "shapes differ (gloo)",
        patterns=(r"op\.preamble\.length <= op\.nbytes\. (?P<got>\d+) vs (?P<own>\d+)",),
        cause=(
            "the ranks gave one collective tensors of different sizes ({got} bytes came, room was"
            " for {own}), or called different ones"
        ),
        remedy=(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names collective and shapes; every rank gives the same:"
            " pad, or drop_last=True"
        ),
    ),
    known(
        "data worker died",
        patterns=(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>exited unexpectedly|is"
            r" killed by signal: \w+)",
        ),
        cause="data worker (pid {pids}) {how}",
        remedy=(
            "`dmesg` says whether memory ran out: fewer num_workers; num_workers=0 shows an error"
            " of the data set itself"
        ),
        again=True,
    ),
    known(
        "engine not installed",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>jax|jaxlib|flax|optax)\b",),
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[jax]' (for NVIDIA GPUs also 'jax[cuda13]')",
    ),
    known(
        "extra not installed",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>tensorboard|wandb)\b",),
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[{module}]'",
    ),
    known(
        "matplotlib not installed",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>matplotlib)\b",),
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[report]'",
    ),
    known(
        "transformers not installed",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>transformers)\b",),
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[hf]'",
    ),
    known(
        "module not found",
        patterns=(r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",),
        cause="module {module} was not found",
        remedy=(
            "`python -m pip install` it with this same python (`which python`); if it is yours,"
            " start from its directory or set PYTHONPATH"
        ),
    ),
    known(
        "name not in its module",
        patterns=(
            r"ImportError: cannot import name '(?P<name>[^']+)' from (?:partially initialized"
            r" module"
            r" )?'(?P<module>[^']+)'(?:[^\n]*\((?P<path>[^()]+)\))?",
        ),
        cause="{module} has no {name} ({path})",
        remedy=(
            "another version of that package, or a file of yours with its name in the way, or two"
            " modules that import each other"
        ),
    ),
    known(
        "library not found",
        patterns=(r"ImportError: (?P<what>lib[^\s:]+\.so[^\s:]*): cannot open shared object file",),
        cause="the library {what} was not found",
        remedy=(
            "install the package that has it; LD_LIBRARY_PATH; torch and CUDA packages of one index"
        ),
    ),
    known(
        "relative path",
        patterns=(
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^/'][^']*)'",
        ),
        cause="no file {path} in the directory where the command was typed",
        remedy=(
            "a relative path begins there, not beside the script: cd to where it begins, or make it"
            " from __file__"
        ),
    ),
    known(
        "nobody to ask",
        patterns=(r"EOFError: EOF when reading a line",),
        cause=(
            "the script asks for input where nobody types: of several ranks, the first alone is"
            " typed to"
        ),
        remedy="ask on rank 0 and broadcast the answer, or take it from the command line",
    ),
    known(
        "syntax error",
        patterns=(r"^(?P<kind>SyntaxError|IndentationError|TabError): (?P<what>[^\n]*)",),
        cause="{kind}: {what}",
        remedy="correct the line named above; `python -m py_compile FILE` checks without a run",
    ),
    known(
        "checkpoint saved from DDP",
        patterns=(
            r"Error\(s\) in loading state_dict for (?P<model>\w+):[\s\S]*?Unexpected key\(s\) in"
            r" state_dict: \"module\.",
        ),
        cause=(
            "the checkpoint's names begin with `module.`: it was saved from a DDP wrapper, and"
            " {model} is none"
        ),
        remedy=(
            "load into model.module, or save model.module.state_dict(); or cut the prefix:"
            " name.removeprefix('module.')"
        ),
    ),
    known(
        "checkpoint of another model",
        patterns=(
            r"Error\(s\) in loading state_dict for (?P<model>\w+):\s+(?P<first>[^\n]{1,200})",
        ),
        cause="the checkpoint is of another model than {model}: {first}",
        remedy=(
            "the config that it was saved with; strict=False leaves out what does not fit by name"
        ),
    ),
    known(
        "checkpoint damaged",
        patterns=(
            r"PytorchStreamReader failed",
            r"failed finding central directory",
            r"EOFError: Ran out of input",
            r"Error while deserializing header",
        ),
        cause="a checkpoint file is not whole",
        remedy=(
            "an older one; the disk may have been full, or the process killed, while it was saved"
        ),
    ),
    known(
        "checkpoint is a pickle",
        patterns=(r"Weights only load failed",),
        cause="the file holds more than tensors, and torch.load takes only these since 2.6",
        remedy=(
            "save state_dicts of tensors and numbers; torch.serialization.add_safe_globals for"
            " types that you trust"
        ),
    ),
    known(
        "no __main__ guard",
        patterns=(r"An attempt has been made to start a new process before the",),
        cause="the script starts processes while it is imported by them",
        remedy='put what the script does under `if __name__ == "__main__":`',
    ),
    known(
        "no process group",
        patterns=(r"Default process group has not been initialized",),
        cause="a collective was called without a process group",
        remedy=(
            "torch.distributed.init_process_group() first; and start by torchrun or `samecurve"
            " run`, not by plain python"
        ),
    ),
    known(
        "no rank in the environment",
        patterns=(
            r"environment variable (?P<name>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK)"
            r" expected, but not set",
            r"KeyError: '(?P<name>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'",
        ),
        cause="{name} is not set: nobody told this process which rank it is",
        remedy="start it by torchrun --nproc_per_node=N SCRIPT, or by `samecurve run SCRIPT`",
    ),
)
