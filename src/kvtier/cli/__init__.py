"""The command line: `kvtier serve`, `kvtier demo` and what else needs no engine."""
