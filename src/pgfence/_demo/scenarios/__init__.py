"""The scenes, played after the acts. A new one is a file with a SCENE, and its place in this list."""

from __future__ import annotations

from pgfence._demo.scenarios import contention, paused, retries, slots

SCENES = (paused.SCENE, slots.SCENE, contention.SCENE, retries.SCENE)
