"""The adapter between a task's class and an engine.

The adapter fills in what the class leaves out, and checks what the class returns.
"""
