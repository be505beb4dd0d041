"""The ground: virtual time, network, memories, durable storage, scenarios, and the protocols of what lives there.

Everything that simulated processes run on, and what they may know of one another; nothing here imports another room. A
scenario is plain data, so that it can be shrunk. A machine's memory outlives its holder, and a fault can end the holder
at any write.
"""
