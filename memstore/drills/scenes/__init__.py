"""The scenes: what each drill breaks, and how it checks that it is broken.

`scene.py` has the base class and its hooks, in the order in which the runner calls them; `scenes_*.py` are one family
each. A scene takes a DrillContext and knows neither flows nor the runner, which has all scenes by name. A
promise that is broken is appended to `context.broken_promises`, and the drill goes on; a DrillError ends it.
"""
