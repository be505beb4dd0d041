"""Scripted faults with a promised outcome, proved on the bytes (DESIGN 1.6).

Reading order: `catalogue.py` what is promised, `training.py` states made without the store and compared with what
came back, `ranks.py` the Ray actors that put and get, `faults.py` how things are broken and how it is checked that
they are, `site.py` the cluster a drill runs on, `scenes.py` one class per drill, `runner.py` the phases in order,
`report.py` what a person sees, `cli.py` the command.
"""
