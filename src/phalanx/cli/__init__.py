"""The command `phalanx`: one module a subcommand, imported when it is used."""
