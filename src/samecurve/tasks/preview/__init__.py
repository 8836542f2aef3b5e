"""The data that a task will read: its first samples as they go into the model, and statistics of
its data.

Everything here is neutral: experiments/data_show.py makes blocks of a page of it. No model is
built.
"""
