"""TensorBoard: an event file with scalars and texts under ``keepstep/``, written without torch or TensorFlow."""

from __future__ import annotations

from keepstep.view.notify.mailing import text_lines
from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace import PacePoint
from keepstep.view.notify.tracker import TrackerOptions


class TensorBoardTracker:
    """A folder ``keepstep`` in the job's log folder, which TensorBoard shows as a run beside the job's own."""

    def __init__(self, options: TrackerOptions) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._shapes, self._types, self._text = tensor_shape_pb2, types_pb2, metadata
        self._writer = EventFileWriter(options.folder, flush_secs=5)

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
