"""How often to put, and how often to write to durable storage.

Ranks, the controller and the durable room ask it. Policy on numbers alone: it knows no job and no host.
"""
