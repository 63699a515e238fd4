"""What scripts use beside `phalanx.init`: argument parser and epoch timer."""
