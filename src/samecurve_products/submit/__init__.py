"""Jobs for engines that others run: Slurm, SkyPilot, Kubernetes, Ray.

job.py makes a job from a config and checks it with the plan; one file an engine writes it down, and
says which command submits it. Nothing here waits for a job, or keeps anything about it: a job's
state is its run directory.
"""
