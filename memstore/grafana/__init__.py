"""A Grafana dashboard and Prometheus rules for what `core/metrics.py` names; `memstore metrics` prints them."""
