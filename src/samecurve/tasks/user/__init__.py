"""A user's own task: `task: path/to/file.py:MyTask` in a config, one file of ordinary PyTorch, no
base class.

    from samecurve import Mean

class MyTask: def __init__(self, model, data): ...     # optional: the config's own `model:` and
`data:` fields, as mappings def model(self): ...                     # -> nn.Module, built anew def
loss(self, model, batch): ...        # -> Mean(sum over what was counted, how much that was) def
train_data(self): ...                # -> __len__ and __getitem__(ids) -> {name: array of one row an
id}; or a torch Dataset def eval_data(self): ...                 # optional: likewise, held out def
metrics(self, model, batch): ...     # optional: -> {name: Mean}, added over all devices and divided
once def initial(self, name, shape): ...      # optional: -> Initial(std, mean) | None: the module's
own value def optimizer(self, params, lr): ...     # optional (torch): -> torch.optim.Optimizer over
(name, parameter) pairs elementwise = True                       # optional: that optimizer updates
each number by itself coupled = ("contrastive loss",)          # optional: what mixes the samples of
a batch, beside BatchNorm, which is found

What `__init__`, `train_data` and `eval_data` draw from the global generators of torch, numpy and
Python is the same in every process: they are called in this order after seeding those, once, as in
a script that begins with manual_seed.
"""
