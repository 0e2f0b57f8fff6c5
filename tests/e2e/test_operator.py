"""`keepstep operator` under the role that is shipped, on a real control plane of Kubernetes with stand-in nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import kube_bed
from tests.e2e.kube_bed import until
from tests.e2e.operated_jobs import Operated
from tests.warm.warm_fork import ROOM

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Operated]:
    if reason := kube_bed.missing():
        pytest.skip(reason)
    pytest.importorskip("lightkube")
    warm = {name: os.environ[name] for name in (ROOM, "PYTHONPATH")}
    with kube_bed.kubernetes(tmp_path, environ=warm) as bed:
        made = Operated(bed)
        try:
            yield made
        finally:
            made.stop()
            print(made.said()[-8000:])


def test_a_job_trains_and_is_not_run_again_once_it_has_finished(cluster: Operated) -> None:
    cluster.start()
    cluster.train(20)
    until(lambda: cluster.status().get("phase") == "Running", "the job runs", 60)
    until(lambda: cluster.status().get("phase") == "Succeeded", "the job has finished", 90)
    assert sorted(cluster.pods()) == ["train-0", "train-1", "train-2", "train-3"]
    nodes = {one["spec"]["nodeName"] for one in cluster.pods().values()}
    assert len(nodes) == 4, "no two pods share a node"
    cluster.api.delete("/api/v1/namespaces/default/pods/train-2")
    until(lambda: "train-2" not in cluster.pods(), "the pod is gone", 30)
    cluster.api.delete("/apis/keepstep.dev/v1alpha1/namespaces/default/trainingjobs/train")
    until(lambda: not cluster.pods(), "Kubernetes has cleaned up", 60)
    assert "cannot" not in cluster.said()
