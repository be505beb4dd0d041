"""A Grafana dashboard and Prometheus rules for what `core/report/metrics.py` names; `memstore metrics` prints them."""
