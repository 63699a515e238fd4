"""An `Analysis` as page, plots, tables and words; nothing is computed here."""
