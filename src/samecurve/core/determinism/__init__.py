"""The promise, on five pages that import nothing else of ours.

Read them in this order: data_order.py (which samples a step has), microbatches.py (which device
computes which of them), sample_keys.py (what their random numbers follow), mean.py (what a loss is)
and step_arithmetic.py (how sums become an update). tests/test_promise.py holds the whole program to
them.
"""
