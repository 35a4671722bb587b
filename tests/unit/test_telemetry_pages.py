"""The reference page, the dashboard and the alert rules name the metrics and attributes of the code, all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine

from pgfence import telemetry
from pgfence._process.events import emit_event
from pgfence._telemetry import metrics
from pgfence.config import events_of

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference" / "telemetry.md"
RULES = DOCS / "operate" / "pgfence-alerts.yml"
DASHBOARD = DOCS / "operate" / "pgfence-dashboard.json"

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OF_PROMETHEUS = {"job", "instance", "le"}


def to_prometheus(metric: metrics.Metric) -> set[str]:
    """Return the names of a metric's series in Prometheus."""
    name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
    return {name + suffix for suffix in SUFFIXES[metric.instrument]}


def find_metrics(text: str) -> set[str]:
    """Return the names that begin with pgfence_ and are no label."""
    labels = {name.replace(".", "_") for metric in metrics.METRICS for name in metrics.get_attribute_names(metric)}
    return set(re.findall(r"\bpgfence_[a-z_]+", text)) - labels


def find_labels(queries: Iterable[str]) -> set[str]:
    """Return the labels that queries select or group by."""
    text = "\n".join(queries)
    groups = re.findall(r"\b(?:by|without) ?\(([^)]*)\)", text)
    return {name.strip() for group in groups for name in group.split(",")} | set(
        re.findall(r"(\w+)(?:=~?|!=|!~)\"", text)
    )


def list_queries() -> dict[str, list[str]]:
    """Return the queries of dashboard and rules."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    rules = re.sub("^ *(?:summary|description):.*$", "", RULES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        DASHBOARD.name: [target["expr"] for panel in panels for target in panel.get("targets", ())],
        RULES.name: [rules],
    }


def test_the_reference_lists_every_metric() -> None:
    """With instrument, unit, attributes and description as in the code, in its order."""
    table = re.findall(
        r"^\| `(pgfence\.[^`]+)` \| (\w+), `([^`]+)` \| (.+) \| (.+) \|$", REFERENCE.read_text("utf-8"), re.MULTILINE
    )
    assert [
        (name, kind, unit, tuple(re.findall("`([^`]+)`", names)), text) for name, kind, unit, names, text in table
    ] == [(each.name, each.instrument, each.unit, each.attributes, each.description) for each in metrics.METRICS]


def test_the_reference_explains_every_attribute() -> None:
    """Each attribute has a row that lists its values."""
    page = REFERENCE.read_text(encoding="utf-8")
    names = {name for metric in metrics.METRICS for name in metric.attributes}
    assert names == set(re.findall(r"^\| `([a-z._]+)` \| [^|]+ \|$", page, re.MULTILINE))


@pytest.mark.parametrize("file", [DASHBOARD.name, RULES.name])
def test_queries_use_metrics_and_labels_that_exist(file: str) -> None:
    """A renamed metric would leave a panel empty and an alert silent."""
    queries = list_queries()[file]
    known = {name for metric in metrics.METRICS for name in to_prometheus(metric)}
    found = find_metrics("\n".join(queries))
    assert found
    assert found <= known
    labels = {name.replace(".", "_") for metric in metrics.METRICS for name in metrics.get_attribute_names(metric)}
    assert find_labels(queries) <= labels | OF_PROMETHEUS


def test_the_dashboard_shows_every_metric() -> None:
    """Every metric is in at least one panel."""
    shown = find_metrics("\n".join(list_queries()[DASHBOARD.name]))
    missing = [metric.name for metric in metrics.METRICS if not to_prometheus(metric) & shown]
    assert missing == []


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    """Known types and units, unique ids, panels that do not overlap, and the data source of the dashboard's variable.

    After kinds/dashboard/dashboard_kind.cue and packages/grafana-data/src/valueFormats/categories.ts of Grafana.
    """
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["schemaVersion"] == 39
    variables = {each["name"]: each["type"] for each in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query", "database": "query"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in {"row", "stat", "timeseries"}
        x, y, width, height = (panel["gridPos"][side] for side in "xywh")
        cells = {(column, line) for column in range(x, x + width) for line in range(y, y + height)}
        assert x + width <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "s", "percentunit", "ops"}
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets)
        for each in (panel, *targets):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        used = set(re.findall(r"\$(\w+)", json.dumps(targets)))
        assert used <= {*variables, "__range", "__rate_interval"}, panel["title"]


def test_names_in_prometheus_are_those_of_the_exporter() -> None:
    """The rule by which the other tests translate names is the one of OpenTelemetry's exporter."""
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = exporter.PrometheusMetricReader()
    provider = sdk.MeterProvider([reader])
    engine = create_engine("postgresql+psycopg://localhost/shop")
    telemetry.instrument(engine, provider)
    events = events_of(engine)
    emit_event(events, "timeout", "close:7", "lease", waited=1.0, contended=True)
    emit_event(events, "released", "close:7", "lease", held=1.0)
    events.record("renewal", 0.1)
    text = prometheus_client.generate_latest().decode()
    provider.shutdown()
    found = {
        sample.name: sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("pgfence_") and not sample.name.endswith("_created")
    }
    expected = (metrics.ATTEMPTS, metrics.CONTENTION, metrics.WAIT, metrics.HOLD, metrics.RENEWAL)
    assert set(found) == {name for metric in expected for name in to_prometheus(metric)}
    labels = found["pgfence_lock_contention_total"]
    assert {name: labels[name] for name in labels if not name.startswith("otel_")} == {
        "db_namespace": "shop",
        "pgfence_lock_kind": "lease",
        "pgfence_name_prefix": "close",
    }
