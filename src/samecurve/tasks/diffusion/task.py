"""The diffusion task without its model: pictures, captions, and the files that a run keeps.

No engine is imported here; the model is in torch_task.py.
"""
