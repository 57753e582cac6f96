"""The alerts and the dashboard of examples/deploy ask for metrics and labels that there are, and docs/operating.md explains each alert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from accel.integrations.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
OF_PROMETHEUS = {"job", "instance", "le"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    return list(group["rules"])


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DEPLOY / "grafana-dashboard.json").read_text()))


def panels() -> list[tuple[str, str, str]]:
    """Return title, query and legend of each query of the dashboard."""
    found = [(panel["title"], each["expr"], each["legendFormat"]) for panel in dashboard()["panels"] for each in panel["targets"]]
    return [*found, *((each["name"], each["expr"], each["titleFormat"]) for each in dashboard()["annotations"]["list"])]


ASKED = [*((rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in rules()), *panels()]


def series() -> dict[str, set[str]]:
    """Return the labels of each series that a scrape may have, by its name."""
    found: dict[str, set[str]] = {"up": set()}
    for metric in METRICS:
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
        found.update({f"{metric.name}{end}": set(metric.labels) for end in ends})
    return found


def parts(query: str) -> list[Any]:
    """Return all expressions of a query, parsed as Prometheus does."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "5m")), found.append)
    return found


@pytest.mark.parametrize(("title", "query", "text"), ASKED, ids=[title for title, _, _ in ASKED])
def test_a_query_asks_for_what_there_is(title: str, query: str, text: str) -> None:
    known, named, wanted = series(), set[str](), set[str]()
    for part in parts(query):
        if isinstance(part, promql_parser.MatrixSelector):
            part = part.vector_selector
        if isinstance(part, promql_parser.VectorSelector):
            assert part.name in known
            named.add(part.name)
            assert {matcher.name for matcher in part.matchers.matchers} <= known[part.name] | OF_PROMETHEUS
        elif isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            wanted |= set(part.modifier.labels)
    assert named
    wanted |= set(re.findall(r"\$labels\.(\w+)", text)) | set(re.findall(r"{{(\w+)}}", text))
    assert wanted <= {label for name in named for label in known[name]} | OF_PROMETHEUS
    assert ("histogram_quantile" in query) == ("_bucket" in query)


@pytest.mark.parametrize(("title", "query", "text"), ASKED, ids=[title for title, _, _ in ASKED])
def test_the_first_fault_is_seen(title: str, query: str, text: str) -> None:
    """A series of a fault begins with 1, and Prometheus sees no increase in its first value."""
    begins_late = {"accel_device_faults_total", "accel_hardware_xid_errors_total"}
    increases = [
        part for part in parts(query) if isinstance(part, promql_parser.MatrixSelector) and part.vector_selector.name in begins_late
    ]
    assert not increases or "unless" in query


def test_each_alert_is_explained() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in page] == []
    assert {rule["labels"]["severity"] for rule in rules()} == {"info", "warning", "critical"}


def test_the_dashboard_fits_together() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert [each["name"] for each in dashboard()["templating"]["list"]] == ["datasource", "job", "instance"]
