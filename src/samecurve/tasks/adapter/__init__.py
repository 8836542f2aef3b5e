"""What stands between a task's class and the engines, for every task.

It fills in what the class leaves out, and checks what the class returns.
"""
