"""A put at its holder: from what a rank passes on to copies that peers have sealed.

`seal.py` a submission becomes a sealed shard; `push.py` copies it to one other host; `equal_ranks.py` and
`shared_shards.py` are for ranks with equal state: offers that wait for this host's equal shard. It may know all of
`core/holder`.
"""
