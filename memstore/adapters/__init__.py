"""Ways in for frameworks: each adapter is thin and sits on the public Store.

Users import them; each imports its framework, and nothing of the store imports one. An adapter may use
`memstore.inplace`, `memstore.client` and what stands below them, and none of it knows a framework.

`torch.py` and `data.py` hold what several need: model and optimizers as one object, the place in the data. The files
`ray_train.py` puts recovery in place under Ray Train; `NAMES` there has the private names of Ray it relies on.
"""
