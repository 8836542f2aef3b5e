"""The data that a task will read: its first samples as they go into the model, and statistics of
its data.

Everything here is neutral: the product `page` makes blocks of it. No model is built.
"""
