"""Knows nothing of ranks."""

print("trained", sum(x * x for x in range(1000)))
