"""MLflow: metrics under ``keepstep/`` by step, notices as a tag and as text files of the run."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from keepstep.view.notify.mailing import text_lines
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint
from keepstep.view.notify.tracker import TrackerOptions

_MOST_TAG = 4000  # characters that MLflow keeps of a tag


class MlflowTracker:
    """The job's own run in MLflow, or one beside it."""

    def __init__(self, options: TrackerOptions) -> None:
        if "://" not in options.uri or options.uri.startswith("file:"):
            # MLflow 3 refuses its own files without it; who has them names them on purpose.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        mlflow, entities = import_module("mlflow"), import_module("mlflow.entities")
        self._metric: Any = entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=options.uri or None)
        self._is_own = not options.run_id
        self._run_id = options.run_id or self._made(options)
        self._client.get_run(self._run_id)  # says at once that there is no such run

    def _made(self, options: TrackerOptions) -> str:
        name = options.project or "keepstep"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        return self._client.create_run(experiment, run_name=f"keepstep {options.run}").info.run_id

    def pace(self, point: PacePoint) -> None:
        """Add a point to the series."""
        at_ms = int(point.unix_s * 1000)
        metrics = [
            self._metric(f"keepstep/{name}", value, at_ms, point.step) for name, value in point.series.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def notice(self, notice: Notice) -> None:
        """Set the tag ``keepstep.notice`` and add a file ``keepstep/NNNNNN-WHAT.txt``."""
        self._client.set_tag(self._run_id, "keepstep.notice", notice.title[:_MOST_TAG])
        number = notice.id.rpartition("/")[2]
        text = "\n".join(text_lines(notice)) + "\n"
        self._client.log_text(self._run_id, text, f"keepstep/{number:0>6}-{notice.what}.txt")

    def close(self) -> None:
        """End the run, unless it is the job's own."""
        if self._is_own:
            self._client.set_terminated(self._run_id)
