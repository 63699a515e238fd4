"""Distributed tests: markers for pytest, the program of each rank, and one verdict over all workers."""
