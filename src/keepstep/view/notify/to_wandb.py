"""Weights & Biases: series under ``keepstep/`` by ``keepstep/step``, notices as alerts."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from keepstep.view.notify.mailing import text_lines
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint
from keepstep.view.notify.tracker import TrackerOptions


class WandbTracker:
    """A run of W&B, or the job's own one, to which it is added as another writer."""

    def __init__(self, options: TrackerOptions) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        wandb: Any = import_module("wandb")

        settings: dict[str, Any] = {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,
            "x_disable_meta": True,
            "init_timeout": 60,
        }
        mode = options.mode or os.environ.get("WANDB_MODE") or "online"
        if options.run_id and mode == "online":
            # The job writes to this run, too: it alone says when the run is over.
            mode = "shared"
            settings |= {"x_primary": False, "x_label": "keepstep", "x_update_finish_state": False}
        self._levels = {
            "info": wandb.AlertLevel.INFO,
            "warning": wandb.AlertLevel.WARN,
            "critical": wandb.AlertLevel.ERROR,
        }
        self._run = wandb.init(
            project=options.project or None,
            entity=options.entity or None,
            id=options.run_id or None,
            name=None if options.run_id else f"keepstep {options.run}",
            dir=options.folder or None,
            mode=mode,
            resume="allow" if options.run_id else None,
            settings=wandb.Settings(**settings),
        )
        self._run.define_metric("keepstep/step", hidden=True)
        self._run.define_metric("keepstep/*", step_metric="keepstep/step")
        self._step = 0

    def pace(self, point: PacePoint) -> None:
        """Add a point to the series."""
        self._step = point.step
        known = {f"keepstep/{name}": value for name, value in point.series.items()}
        self._run.log({"keepstep/step": point.step, **known})

    def notice(self, notice: Notice) -> None:
        """Send an alert, and keep the title in the series and the summary."""
        self._run.log(
            {"keepstep/step": max(notice.job.newest_step, self._step), "keepstep/notice": notice.title}
        )
        self._run.summary["keepstep/last_notice"] = notice.title
        title, text = (_unmarked(part) for part in (notice.title, "\n".join(text_lines(notice))))
        self._run.alert(title, text, level=self._levels[notice.severity])

    def close(self) -> None:
        """Write and upload what is left."""
        self._run.finish()


def _unmarked(text: str) -> str:
    """The text without the brackets by which Slack, where W&B sends alerts, would mention somebody."""
    return text.replace("<", "‹").replace(">", "›")
