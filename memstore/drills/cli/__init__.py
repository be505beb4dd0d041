"""The commands of `memstore drill`.

One command for each drill of the catalogue, `list`, and `run` for a suite. A command imports Ray only when it plays.
Exit codes of a drill: 0 the promised outcome, 1 it did not work or was refused, 2 wrong usage, 3 a broken promise; of
`run`: 0 all kept, 1 otherwise. Lines for people go to stdout; with `--json` to stderr.
"""
