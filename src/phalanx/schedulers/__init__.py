"""Schedulers: where a plan is carried out. They alone write run directories and start processes."""
