"""A cluster to try things on: `python -m tests.cluster up`, `state`, `strike KIND`, `down`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# `python -m tests.cluster` finds the package under another name than pytest.
sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    """Run one command."""
    from cluster import cleanup
    from cluster.cluster import WAYS, Cluster
    from cluster.strikes import Strike, strike

    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=["up", "state", "strike", "down"])
    parser.add_argument("kind", nargs="?", choices=[kind.name.lower() for kind in Strike], help="for strike")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pgfence-cluster"), help="default: %(default)s")
    parser.add_argument("--asynchronous", action="store_true", help="asynchronous replication")
    parser.add_argument("--block", type=int, default=1, help="use 127.0.BLOCK.0/24; default: %(default)s")
    parser.add_argument("--etcd-nodes", type=int, choices=[1, 3], default=1, help="default: %(default)s")
    options = parser.parse_args()
    if options.command == "up":
        cluster = Cluster(
            options.folder,
            synchronous=not options.asynchronous,
            block=options.block,
            etcd_nodes=options.etcd_nodes,
        )
        cluster.start(guarded=False)
        print("\n".join(cluster.url(way) for way in WAYS))
        return
    if options.command == "down":
        cleanup.remove(options.folder)
        return
    cluster = Cluster.open(options.folder)
    if options.command == "strike":
        print(strike(cluster, Strike[options.kind.upper()]).to_json())
    for name, view in cluster.view().items():
        print(name, cluster.nodes[name].host, view)


if __name__ == "__main__":
    main()
