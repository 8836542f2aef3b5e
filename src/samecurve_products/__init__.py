"""Products: verbs that stand beside the kernel. They import samecurve; samecurve imports none.

Each product is one folder, and enters the command line by an entry point of the group
`samecurve.verbs`.
"""
