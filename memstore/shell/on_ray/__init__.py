"""What runs on Ray: actors, membership in the GCS, metrics.

`memstore.admin` starts it. The only room that imports Ray: holder and controller know it as the port of a cluster
manager.
"""
