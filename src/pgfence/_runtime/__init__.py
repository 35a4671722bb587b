"""How we wait: the only place with threads, tasks, sleeping and pinned connections."""
