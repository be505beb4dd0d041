"""The controller's state: facts, hosts, jobs, steps.

Data and look-ups, few decisions; every deciding room of the core stands on it, and it knows none of them. What an event
makes the controller do is collected in `effects.py`.

    (unknown) --up--> live --silence > suspect_after_s--> suspect --silence > dead_after_s--> dead
                       ^  <--------- beats again ---------'          any --reset connection--> dead --up--> live
    open --every shard on enough domains--> committing --fact spread--> committed
      |--some rank skipped--> abandoned       '--a newer step committed--> superseded
"""
