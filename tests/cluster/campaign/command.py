"""The command line of campaigns."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from cluster.campaign.plan import build_plan
from cluster.campaign.result import Result, merge_results
from cluster.campaign.run import strike_clients
from cluster.cluster import Cluster, make_folder
from cluster.strikes import Strike


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.campaign",
        description="Strike at a cluster while clients use most primitives, and judge what they recorded.",
        epilog="The exit code is 1 if a guarantee was broken.",
    )
    parser.add_argument(
        "--mode", choices=["sync", "async"], default="sync", help="of replication; default: %(default)s"
    )
    parser.add_argument("--failovers", type=int, default=50, help="how many there should be; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="for the order of the strikes; default: %(default)s")
    parser.add_argument("--strikes", help="strikes to carry out instead of a plan, such as SWITCHOVER,PAUSE")
    parser.add_argument("--block", type=int, default=2, help="use 127.0.BLOCK.0/24; default: %(default)s")
    parser.add_argument("--etcd-nodes", type=int, choices=[1, 3], default=1, help="default: %(default)s")
    parser.add_argument("--records", type=Path, help="folder for the records; default: a new one under /tmp")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="merge these results instead of a campaign"
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    return parser.parse_args()


def run_campaign(options: argparse.Namespace) -> Result:
    """Start a cluster, run the campaign, and return its result."""
    records = options.records or Path(tempfile.mkdtemp(prefix="pgfence-records-"))
    records.mkdir(parents=True, exist_ok=True)
    print(f"records are in {records}", flush=True)
    if options.strikes:
        plan = [Strike[name] for name in options.strikes.split(",")]
    else:
        plan = build_plan(options.failovers, options.seed)
    with Cluster(
        make_folder(), synchronous=options.mode == "sync", block=options.block, etcd_nodes=options.etcd_nodes
    ) as cluster:
        return strike_clients(
            cluster,
            records,
            plan,
            failovers=0 if options.strikes else options.failovers,
            seed=options.seed,
            report=lambda line: print(line, flush=True),
        )


def describe_result(result: Result) -> str:
    """Return the result as text."""
    summary = result.summarize()
    lines = [f"{result.failovers} failovers with {result.mode} replication", "counts:"]
    lines += [f"  {name}: {number}" for name, number in sorted(result.counts.items())]
    lines += ["seconds until the new leader:"]
    lines += [f"  {kind}: {times}" for kind, times in result.leaders.items()]
    lines += ["seconds from the new leader to the first success, median and longest:"]
    for way, primitives in summary["recovery"].items():
        times = ", ".join(f"{name} {each['median']}/{each['longest']}" for name, each in primitives.items())
        lines.append(f"  {way} ({summary['above the bar'][way]} above the bar): {times}")
    for kind, ways in summary["recovery by kind"].items():
        times = ", ".join(f"{way} {each['median']}/{each['longest']}" for way, each in ways.items())
        lines.append(f"  {kind}: {times}")
    lines.append(f"long leases kept and lost: {result.kept}")
    lines.append(f"overlaps of advisory locks: {result.overlaps}")
    lines.append(f"findings: {result.findings_by_kind}")
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"VIOLATION {violation}" for violation in result.violations]
    return "\n".join(lines)


def main() -> int:
    """Run the command, and return its exit code."""
    options = parse_arguments()
    merged = [Result.read(path) for path in options.merge or ()]
    result = merge_results(merged) if merged else run_campaign(options)
    result.write(options.out)
    print(describe_result(result))
    return 1 if result.violations else 0
