"""Configs of other tools, read field by field as configs of ours, and written as such."""
