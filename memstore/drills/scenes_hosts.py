"""Faults of whole hosts and of several at once."""

from __future__ import annotations

from typing import Any

from memstore.drills.scene import Scene


class KillHost(Scene):
    """The host of one rank; beyond: every host with a copy of that rank's shard."""

    name = "kill-host"

    def setup(self) -> None:
        super().setup()
        self.hosts = self.hosts or self.holders[:1]

    def victims(self) -> list[str]:
        return self.hosts

    def leaves(self, host: str) -> bool:
        return True  # on a running cluster it comes back empty, but a launcher would not wait for the machine

    def may_hit(self, holders: list[str]) -> bool:
        return self.site.may_lose(holders if self.is_beyond else holders[:1])

    def inject(self) -> str:
        return "; ".join([self.site.lose_host(host, self.run.job.ranks) for host in self.hosts])

    def wait_for_effect(self) -> str:
        # lose_host() checks each step of it before it goes on to the next.
        return f"{', '.join(self.hosts)}: processes gone, port silent, arena file gone (each checked)"

    def detected(self, body: dict[str, Any], injected_s: float) -> str | None:
        found = [self.host_noticed(host, body, injected_s) for host in self.hosts]
        return "; ".join(str(why) for why in found) if all(found) else None


SCENES = {scene.name: scene for scene in (KillHost,)}
