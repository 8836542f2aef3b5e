"""One warm pool of four ranks for the whole test session: real processes, real Gloo; sub-groups
serve worlds 1 to 4.
"""

from samecurve.launch.pool import JobFailedError, Pool

__all__ = ["SIZE", "JobFailedError", "Pool"]

SIZE = 4
