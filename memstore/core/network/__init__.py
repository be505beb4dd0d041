"""When bytes of copies may leave a host, between its ranks' collectives, and in which portions they travel.

The senders of `shell/holder`, `shell/peer` and `shell/rank` ask it. It touches no socket and reads no clock.

    free --a rank begins a collective--> held --it ends, or 10 s--> free
      '--a newer put of the rank begins, or 60 s--> let go
"""
