"""Real trackers, without a network: what is in their files afterwards."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from tests.unit.view.notify.receiving import web
from tests.unit.view.notify.told_runs import START_S, Look, over, seen, slow

from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint
from keepstep.view.notify.receivers import Track, read_receivers
from keepstep.view.notify.tracker import TrackerOptions, TrackerOrder
from keepstep.view.notify.tracker_process import TrackerProcess


@pytest.fixture
def notices() -> list[Notice]:
    look = Look()
    look.at(seen())
    return [*look.at(seen(slow(1, 3))), *look.at(seen(over(slow(1, 3))))]


def record(options: TrackerOptions, notices: list[Notice]) -> None:
    """Record three points and all notices in the tracker's own process."""
    lines: list[str] = []
    one = TrackerProcess(options, lines.append)
    for step in range(3):
        one.record(TrackerOrder(point=PacePoint(step, START_S + step, 0.5 + step, None, 0.25, 1, 2)))
    for notice in notices:
        one.record(TrackerOrder(notice=notice))
    one.close(240.0)
    assert lines == []
    assert not one.waits


def test_tensorboard(tmp_path: Path, notices: list[Notice]) -> None:
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader", reason="no tensorboard"
    )
    record(TrackerOptions("tensorboard", "r", folder=str(tmp_path / "tb" / "keepstep")), notices)
    events = import_module("tensorboard.compat.proto.event_pb2")
    (path,) = (tmp_path / "tb" / "keepstep").iterdir()
    scalars, texts = [], []
    for event in loader.RawEventFileLoader(str(path)).Load():
        for value in events.Event.FromString(event).summary.value:
            if value.HasField("simple_value"):
                scalars.append((events.Event.FromString(event).step, value.tag, value.simple_value))
            else:
                texts += [text.decode() for text in value.tensor.string_val]
    assert (2, "keepstep/iteration_s", 2.5) in scalars
    assert len(scalars) == 3 * 4
    assert [text.strip().splitlines()[0] for text in texts] == [one.title for one in notices]


def test_mlflow_in_files_and_in_the_run_of_the_job(tmp_path: Path, notices: list[Notice]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    uri = f"file://{tmp_path}/mlruns"
    client = mlflow.MlflowClient(tracking_uri=uri)
    job = client.create_run(client.create_experiment("training")).info.run_id
    record(TrackerOptions("mlflow", "r", run_id=job, uri=uri), notices)
    history = client.get_metric_history(job, "keepstep/iteration_s")
    assert sorted((one.step, one.value) for one in history) == [(0, 0.5), (1, 1.5), (2, 2.5)]
    run = client.get_run(job)
    assert run.data.tags["keepstep.notice"] == notices[-1].title
    assert run.info.status == "RUNNING", "the job's run is the job's"
    assert len(client.list_artifacts(job, "keepstep")) == 2


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records in a file of W&B: a log as LevelDB's, in blocks of 32 KiB behind 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(content):
        room = 32_768 - at % 32_768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path, notices: list[Notice]) -> None:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="no wandb")
    options = TrackerOptions("wandb", "r", "p", mode="offline", folder=str(tmp_path), run_id="job1")
    record(options, notices)
    (path,) = tmp_path.glob("wandb/offline-run-*-job1/run-job1.wandb")
    rows: list[dict[str, object]] = []
    alerts: list[str] = []
    for content in wandb_records(path.read_bytes()):
        found = proto.Record.FromString(content)
        if found.HasField("history"):
            items = found.history.item
            rows.append(
                {".".join(one.nested_key) or one.key: msgspec.json.decode(one.value_json) for one in items}
            )
        if found.HasField("alert"):
            alerts.append(found.alert.title)
    assert alerts == [one.title for one in notices]
    assert [(row["keepstep/step"], row["keepstep/iteration_s"]) for row in rows[:3]] == [
        (0, 0.5),
        (1, 1.5),
        (2, 2.5),
    ]
    assert [row["keepstep/notice"] for row in rows[3:]] == alerts


def test_opentelemetry_to_a_collector(notices: list[Notice]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry")
    import gzip

    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with web("200") as collector:
        uri = f"http://127.0.0.1:{collector.port}"
        record(TrackerOptions("otel", "train-7b", uri=uri, headers={"x-key": "k"}), notices)
    spans, metrics = [], set()
    for request in collector.requests:
        assert request.headers["x-key"] == "k"
        body = (
            gzip.decompress(request.body)
            if request.headers.get("content-encoding") == "gzip"
            else request.body
        )
        if request.target == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans += [span for scope in resource.scope_spans for span in scope.spans]
        else:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                metrics |= {one.name for scope in resource.scope_metrics for one in scope.metrics}
    assert [span.name for span in spans] == ["keepstep opened", "keepstep over", "incident slow"]
    assert len({span.trace_id for span in spans}) == 1, "one incident is one trace"
    assert spans[2].end_time_unix_nano - spans[2].start_time_unix_nano == 30 * 10**9
    assert {"keepstep.iteration.duration", "keepstep.lost.ratio", "keepstep.step"} <= metrics


def test_a_tracker_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keepstep.core.errors import UsageError
    from keepstep.view.notify import receivers

    file = tmp_path / "notify.toml"
    file.write_text('[tensorboard]\nfolder = "tb"\n')
    monkeypatch.setitem(receivers._NEEDS, "tensorboard", "no_such.package")
    with pytest.raises(
        UsageError, match=r"\[tensorboard\] needs a package: pip install 'keepstep\[tensorboard\]'"
    ):
        read_receivers(file, "r", {})
    monkeypatch.setitem(receivers._NEEDS, "tensorboard", "json")
    (track,) = read_receivers(file, "r", {})
    assert isinstance(track, Track)
    assert track.options.folder == str(tmp_path / "tb" / "keepstep")
