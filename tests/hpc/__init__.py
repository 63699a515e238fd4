"""Run on every worker of a launch by `phalanx test`; deselected elsewhere."""
