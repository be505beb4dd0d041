"""What the parts of one drill share: its scene, its flow, the judgement and the runner."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from memstore.config import Config
from memstore.drills.model.options import Options
from memstore.drills.model.promises import Drill, Promise
from memstore.drills.model.report import Report, Timeline
from memstore.drills.sites.scratch import ScratchJob
from memstore.drills.sites.site import Site


@dataclass
class DrillContext:
    """The drill, its site, its scratch job and what was found so far; the runner builds it, and it names no part."""

    drill: Drill
    site: Site
    options: Options
    config: Config  # of the scratch job
    promise: Promise  # a flow replaces it if the site cannot give the drill what the promise needs
    rng: random.Random  # seeded with the drill and its options; draws victims and moments
    report: Report
    timeline: Timeline
    job: ScratchJob
    job_before: dict[str, Any] = field(default_factory=dict)  # the job's status right before the fault
    places: list[str] = field(default_factory=list)  # live hosts, in the order in which ranks are given to them
    broken_promises: list[str] = field(default_factory=list)
