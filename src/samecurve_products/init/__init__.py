"""The interview of `samecurve init`: a few questions, whose answers become a config.

Each answer is checked by the code that reads configs and plans runs, as soon as it is known.
"""
