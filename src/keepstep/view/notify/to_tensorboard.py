"""TensorBoard: an event file with scalars and texts under ``keepstep/``, written without torch or TensorFlow."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from keepstep.view.notify.mailing import text_lines
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint
from keepstep.view.notify.tracker import TrackerOptions


class TensorBoardTracker:
    """A folder ``keepstep`` in the job's log folder, which TensorBoard shows as a run beside the job's own."""

    def __init__(self, options: TrackerOptions) -> None:
        proto = "tensorboard.compat.proto"
        self._events: Any = import_module(f"{proto}.event_pb2")
        self._summaries: Any = import_module(f"{proto}.summary_pb2")
        self._tensors: Any = import_module(f"{proto}.tensor_pb2")
        self._shapes: Any = import_module(f"{proto}.tensor_shape_pb2")
        self._types: Any = import_module(f"{proto}.types_pb2")
        self._text: Any = import_module("tensorboard.plugins.text.metadata")
        files: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = files.EventFileWriter(options.folder, flush_secs=5)

    def pace(self, point: PacePoint) -> None:
        """Add a point to the series."""
        values = [
            self._summaries.Summary.Value(tag=f"keepstep/{name}", simple_value=value)
            for name, value in point.series.items()
        ]
        self._add(values, point.step, point.unix_s)

    def notice(self, notice: Notice) -> None:
        """Add a text. It is Markdown there, so that it is indented, which shows it as it is."""
        text = "\n".join(f"    {line}" for line in text_lines(notice))
        tensor = self._tensors.TensorProto(
            dtype=self._types.DT_STRING,
            string_val=[text.encode()],
            tensor_shape=self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)]),
        )
        value = self._summaries.Summary.Value(
            tag="keepstep/notices",
            metadata=self._text.create_summary_metadata(display_name="keepstep", description=""),
            tensor=tensor,
        )
        self._add([value], max(notice.job.newest_step, 0), notice.unix_s)
        self._writer.flush()

    def _add(self, values: list[object], step: int, unix_s: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=unix_s, step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
