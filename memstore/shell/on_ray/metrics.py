"""Feeds `ray.util.metrics` in the controller's and the holders' actors: only there, and never on a path that matters.

Ray's agent on each node exports them to Prometheus. It keeps the counters of an actor that is gone, not its gauges.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ray.util import metrics as ray_metrics

from memstore.core.report.metrics import METRICS, Metric, Sample, counted, holder_gauges, holder_growth, status_gauges
from memstore.core.wire.status_rows import EventRow
from memstore.shell.controller import Controller
from memstore.shell.holder.holder import Holder

log = logging.getLogger("memstore")
FEED_S = 5.0  # Ray's own exporter takes them every 10 s
STATUS_S = 30.0  # for a busy controller; it is asked again


class Instruments:
    """One Ray metric for every metric that was ever sampled in this process."""

    def __init__(self, store: str) -> None:
        self.store = store
        self._made: dict[str, Any] = {}
        self._standing: set[tuple[str, tuple[str, ...]]] = set()  # gauges that are not 0
        self._lock = threading.Lock()

    def record(self, samples: Iterable[Sample]) -> None:
        """Take each sample as its metric's kind says."""
        for sample in samples:
            metric = METRICS[sample.name]
            tags = {"store": self.store, **dict(zip(metric.tags, sample.tags, strict=True))}
            instrument = self._instrument(metric)
            if metric.kind == "gauge":
                instrument.set(sample.value, tags)
            elif metric.kind == "counter":
                instrument.inc(sample.value, tags)
            else:
                instrument.observe(sample.value, tags)

    def stand(self, samples: list[Sample]) -> None:
        """Set all gauges; one that is not among the samples any more, such as a removed job's, goes to 0."""
        now = {(sample.name, sample.tags) for sample in samples}
        self.record([*samples, *(Sample(name, 0.0, tags) for name, tags in self._standing - now)])
        self._standing = now

    def _instrument(self, metric: Metric) -> Any:
        with self._lock:
            if metric.name not in self._made:
                tags = ("store", *metric.tags)
                if metric.kind == "histogram":
                    made = ray_metrics.Histogram(metric.name, metric.text, list(metric.buckets), tags)
                else:
                    kind = ray_metrics.Gauge if metric.kind == "gauge" else ray_metrics.Counter
                    made = kind(metric.name, metric.text, tags)
                self._made[metric.name] = made
            return self._made[metric.name]


def feed_from_controller(controller: Controller, stopping: threading.Event) -> None:
    """Begin to export the controller's metrics, until `stopping`."""
    instruments = Instruments(controller.config.store)

    def count(event: EventRow) -> None:
        instruments.record(counted(event))

    def stand() -> None:
        events = controller.event_log
        status = controller.status_soon().result(STATUS_S)
        instruments.stand(status_gauges(status, events.dropped_count + events.failed_count))

    controller.event_log.counters.append(count)
    _every(stand, stopping)


def feed_from_holder(holder: Holder) -> None:
    """Begin to export what one holder knows, until it stops."""
    instruments = Instruments(holder.config.store)
    host, before = holder.state.info.host_id, None

    def feed() -> None:
        nonlocal before
        stats = holder.heartbeat().stats
        instruments.stand(holder_gauges(host, stats))
        instruments.record(holder_growth(host, before, stats))
        before = stats
        for put in holder.io.meter.take():
            instruments.record([Sample("memstore_put_stall_seconds", put.stall_s, (put.job, host))])

    _every(feed, holder.stopping)


def _every(feed: Callable[[], None], stopping: threading.Event) -> None:
    """Run `feed` on a thread of its own; log its failures once."""

    def run() -> None:
        said = ""
        while not stopping.wait(FEED_S):
            try:
                feed()
            except Exception as exc:
                if repr(exc) != said:
                    said = repr(exc)
                    log.warning("metrics are not exported now: %s", said)

    threading.Thread(target=run, name="memstore-metrics", daemon=True).start()
