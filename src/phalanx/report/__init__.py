"""Scaling reports: what runs recorded, as tables, plots and one page. Reads files only, and never imports torch."""
