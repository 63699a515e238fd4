"""From `RunData` to the numbers of a report: pure, and the same for the same runs."""
