"""How missing copies are made again, and surplus ones dropped.

The controller's machine calls it when hosts, copies or steps change. It finds shards with too few copies, newest step
first, and orders pushes; its `Substitutes` keep copies away from hosts that die often.
"""
