"""Facts that take effect once enough journals have them, and the controller's lease.

Every room that records a fact calls `record`; which room makes a fact true stands in `controller/reactions.py`. It
orders and counts facts, and knows nothing of what they mean.

    record --> waiting (no lease) --> sent --> in journals of min(replicas, live) domains --> applied, in order
"""
