"""How a run stands at one moment, as every viewer shows it, whether it was read from its folder or over the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from keepstep.core.incident import Incident
from keepstep.core.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class RankTable:
    """The newest heartbeat of every rank, as columns of one length, in the order of ``rank``."""

    rank: npt.NDArray[np.int32]
    node: npt.NDArray[np.int32]  # node rank of the node that plays it
    step: npt.NDArray[np.int64]  # last finished step; -1 before the first
    phase: npt.NDArray[np.int16]  # a `core.events.Phase`
    iteration_s: npt.NDArray[np.float32]  # duration of the last finished iteration; 0 before the first
    self_s: npt.NDArray[np.float32]  # own time in it
    idle_s: npt.NDArray[np.float32]  # time since the last progress
    overdue_s: npt.NDArray[np.float32]  # how long it has waited for others, if longer than usual; else 0
    is_alive: npt.NDArray[np.bool_]
    is_watched: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. ``agent`` and ``launcher``: ``ok``, ``silent``, ``gone`` or ``none`` (never seen)."""

    node_rank: int
    name: str
    agent: str = "ok"
    launcher: str = "ok"
    heard_s_ago: float | None = None
    notices: tuple[str, ...] = ()  # what is not watched or not written there, and why
    # Newest steps of all its ranks; -1: none.
    sealed_step: int = -1  # whole in the node's memory
    backed_up_step: int = -1  # also in another node's memory
    stored_step: int = -1  # on storage, whole
    storage_troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What one node sent another one lately."""

    source: int  # node rank
    target: int  # node rank
    bytes_per_s: float  # while something was under way
    usual_bytes_per_s: float  # the same over the run so far; 0: not known
    retransmits_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the job ended, as ``end.json`` says."""

    exit_code: int
    category: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """How a run stands. Times are Unix seconds on the controller's host."""

    name: str
    unix_s: float  # when the job was seen like this
    age_s: float = 0.0  # how long ago that was, as far as the clocks tell; 0 while news comes
    state: str = ""  # a value of `JobState`; "ended"; "silent" when no news comes; "" before the first
    state_s: float = 0.0  # for how long
    end: RunEnd | None = None
    world_size: int = 0
    most_nodes: int = 0  # nodes that the job may have
    newest_step: int = -1
    incarnation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    started_unix_s: float = 0.0  # 0: not known
    layout: ParallelLayout | None = None
    nodes: tuple[NodeView, ...] = ()
    spares: tuple[str, ...] = ()
    ranks: RankTable | None = None  # None: nothing is known of the ranks
    incidents: Sequence[Incident] = ()  # oldest first
    unread_open: tuple[int, ...] = ()  # numbers of incidents that are open, and not read or not to be read
    links: tuple[LinkRate, ...] = ()
    has_checkpoints: bool = False
    backup_trouble: str = ""  # why the backup makes no progress
    unwatched_since_unix_s: float = 0.0  # since when an operator has it not watched; 0: it is watched
    thresholds: Mapping[str, str] = field(default_factory=dict[str, str])  # changed by an operator, by name
    troubles: tuple[str, ...] = ()  # what could not be read, a line each
    folder: str = ""  # the whole path of the run's folder, where it is here

    @property
    def open_incidents(self) -> list[Incident]:
        """The incidents that are not over, oldest first."""
        return [one for one in self.incidents if one.status == "open"]

    def node_names(self, node_ranks: Iterable[int]) -> dict[int, str]:
        """Names of these nodes, as far as they are known."""
        nodes = self.nodes
        wanted = set(node_ranks)
        placed = {one for one in wanted if 0 <= one < len(nodes) and nodes[one].node_rank == one}
        names = {one: nodes[one].name for one in placed}
        if rest := wanted - placed:
            names.update((node.node_rank, node.name) for node in nodes if node.node_rank in rest)
        return names

    @property
    def loss_now_steps(self) -> int | None:
        """Steps that would be lost if the worst placed node died now; None without checkpoints."""
        if not self.has_checkpoints or self.newest_step < 0:
            return None
        # By maps, as a job may have 16,384 nodes.
        kept = map(
            max, map(attrgetter("backed_up_step"), self.nodes), map(attrgetter("stored_step"), self.nodes)
        )
        return self.newest_step - min(kept, default=-1)


def unread(snapshot: RunSnapshot, stuck_s: float) -> RunSnapshot:
    """The same once a look at the run has been held up for so many seconds: nothing is heard of it."""
    why = f"the run's folder cannot be read for {stuck_s:.0f} s: its file system hangs"
    return replace(
        snapshot, state="silent", age_s=snapshot.age_s + stuck_s, troubles=(why, *snapshot.troubles)
    )
