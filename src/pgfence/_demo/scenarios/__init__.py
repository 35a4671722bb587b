"""The scenes, in the order in which they are played after the acts. A new scene is a module with a SCENE, listed here."""

from __future__ import annotations

from pgfence._demo.scenarios import contention, election, partitions, paused, retries, slots

SCENES = (paused.SCENE, slots.SCENE, election.SCENE, partitions.SCENE, contention.SCENE, retries.SCENE)
