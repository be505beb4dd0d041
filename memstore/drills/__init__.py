"""Scripted faults with a promised outcome, proved on the bytes.

Reading order: `promises.py` what a drill is, `catalogue.py` the drills there are, `training.py` states made without
the store and compared with what came back, `ranks.py` the Ray actors that put and get, `scratch.py` their job,
`faults.py` how things are broken and how it is checked that they are, `site.py` the cluster a drill runs on,
`scene.py` and one `scenes_*.py` per family what is broken, `flows.py` what the ranks do around it, `judgement.py`
what is held against the promise, `safety.py` what a drill refuses, `runner.py` the phases in order, `report.py` what
a person sees, `cli.py` the command.
"""
