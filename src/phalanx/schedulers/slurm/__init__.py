"""Slurm: the jobs that are submitted, followed and cancelled, and the allocations that exist already."""
