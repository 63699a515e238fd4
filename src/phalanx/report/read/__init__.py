"""From run directories and CSV files to `RunData`."""
