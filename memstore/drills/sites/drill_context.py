"""The context of one drill, which its scene, its flow, the judgement and the runner share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from memstore.config import Config
from memstore.core.wire.status_rows import AttemptStatus
from memstore.drills.model.options import Options
from memstore.drills.model.promises import Drill, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import Site


@dataclass
class DrillContext:
    """The drill, its site, its scratch job and the findings so far. It refers to none of the parts that use it."""

    drill: Drill
    site: Site
    options: Options
    config: Config  # the scratch job's
    promise: Promise  # a flow may replace it: with two hosts no byte needs to come from a peer
    rng: random.Random  # seeded with the drill and its options; draws the victims and the moments
    report: Report
    timeline: Timeline
    job: ScratchJob
    job_before: AttemptStatus | None = None  # the job's status right before the fault
    places: list[str] = field(default_factory=list)  # live hosts, in the order in which they get ranks
    broken_promises: list[str] = field(default_factory=list)
