"""The holder's process: serves ranks and peers, executes the controller's orders.

It decides nothing and never imports torch or Ray. `holder.py` composes the parts; the procedures are those of
`core/holder`, which `blocking_io.py` runs on threads, and whose calls it keeps. `context.py` is what every part may
use; no part is reachable from it. `on_ray` and test clusters start it.
"""
