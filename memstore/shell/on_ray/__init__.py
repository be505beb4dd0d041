"""What runs on Ray: actors, membership in the GCS, metrics."""
