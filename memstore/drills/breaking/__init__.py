"""Faults, and the checks that they took effect.

Scenes and sites call it; each function takes and returns plain values, since it may run on the victim's machine through
a Ray actor. A process is named by pid and start time, so that a signal never hits a later one of the same pid. A fault
that took no effect raises a DrillError: recovery from nothing proves nothing. It imports no other room of drills.

    made --start--> kept up --end--> undone
                       '-- error ------^   `end` raises the error
"""
