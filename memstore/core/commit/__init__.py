"""When a step is committed, and when it is given up on all ranks.

The controller's machine hands it seals and skips.

    open --every shard sealed on enough domains--> committing --fact spread--> committed [degraded]
      |--a rank skipped, or can never be whole--> abandoned       degraded --copies rebuilt--> committed
      '--a newer step committed--> superseded
"""
