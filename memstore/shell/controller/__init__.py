"""The controller's process: sessions to all holders, a clock, and the state machine between them.

`on_ray` and test clusters start it; the cluster manager is behind the port `ClusterMembership`, so it knows no Ray.

    dialled --authenticated--> session --inventory came--> up --connection ends, or declared dead--> dialled again
"""
