"""What a user would pick instead of memstore, each in an environment and processes of its own, timed beside it.

`races.py` says which contestants run together and what is promised, `contestant.py` what each does. Environments lie
under `.peers`, from the pins of `children.py`; one that does not run is reported with the reason. A contestant imports
its own library. Mooncake also needs the system's `libibverbs1`.
"""
