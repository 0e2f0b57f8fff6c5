"""Whom the words of a failed job name: what stands in the line of the cause, who said it, and what stands around it.

A launcher writes the end of a process in one line and its host in the next; Slurm's daemon tells of a full memory, and
srun of whose. Such lines are of one kind of failure, or stand close together, and complete each other. Nobody is named
whom they do not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from posixpath import commonpath
from typing import Literal

from keepstep.core.lost_connection import ranks_named
from keepstep.core.told import Named, Row, Told

Confidence = Literal["high", "medium", "low"]

_SAME_MOMENT_S = 0.5
_MOST_CULPRITS = 16
# Notes that tell where a process ran stand at most so many lines from what they belong to.
_AROUND = 40
_MOST_RANKS = 4096
_MEMORY_FULL = "host-oom"
_ENDED_BY_LAUNCHER = "closing signal SIGTERM"
_TASKS = frozenset({"slurm-task-killed", "slurm-exit", "slurm-task-where"})
# Kinds of failures of a file system that are of one host's mount or disk: the rank that met one tells which.
_OF_ONE_MOUNT = frozenset({"io-error", "not-mounted", "stale-handle", "storage-timeout"})
# What one process meets, but all of its node would.
_OF_WHOLE_NODES = frozenset({"fabric-manager", "gpu-missing", "host-oom", "shm", "driver-mismatch"})
# From so many links on, the one end that all of them share is to blame.
_LINKS_OF_ONE = 3
_URL = re.compile(r"\b(?:s3|gs|gcs|oss|cos|az|abfss?|wasbs?|hdfs|https?)://[^\s'\"<>(),;]{1,1000}")
_PATH = re.compile(r"(?<![\w./:@-])/(?:[\w.@%+=~-]{1,255}/){0,64}[\w.@%+=~-]{1,255}/?(?P<line>:\d)?")
_DATA_URL = re.compile(r"\b(?:s3a?|gs|gcs|oss|cos|az|abfss?|wasbs?|hdfs)://[^\s'\"<>(),;]{1,1000}")
# What is done to data and checkpoints; who tells that it is done tells of none that failed.
_WRITES = re.compile(
    r"(?i)\b(?:open|save|saving|writ(?:e|ing)|upload(?:ing)?|dump(?:ing)?|copy(?:ing)?|resuming)\b"
)
_READS = re.compile(
    r"(?i)\b(?:open|load(?:s|ing)?|read(?:s|ing)?|download(?:ing)?|restor(?:e|ing)|resum(?:e|ing))\b"
)
_SAVING = re.compile(
    r"(?i)\b(?:saving|writing)\b(?: \w+){0,4}?:? ['\"]?((?:\.{1,2}/)?[\w.+=~-]+(?:/[\w.+=~-]+)+)"
)
_SAVED = re.compile(r"(?i)\b(?:saved|wrote|written)\b.*?((?:[\w.+=~-]+|/)(?:/[\w.+=~-]+)+)")
_DONE = re.compile(
    r"(?i)\b(?:saved|wrote|written|uploaded|loaded|downloaded|restored|copied|created|found|using|done)\b"
)
_SETTINGS = re.compile(r"\.(?:ya?ml|json|toml|cfg|ini|conf|log|sh|md)$")
_OF_WRITES = frozenset({"no-space", "quota", "read-only", "object-store-rate-limit"})
_OF_READS = frozenset({"corrupt-checkpoint", "corrupt-data", "missing-path", "missing-file"})
_CODE = re.compile(
    r"^\s*(?:File \"|at |#\d+ |raise |return |\w+ = |[\w.]+\(.*\)$)|-packages/|\bsource code\b"
)
_SYSTEM = re.compile(r"/(?:usr|bin|sbin|lib|lib64|etc|proc|sys|dev|run|boot)(?:/|$)|.*/(?:bin|lib|include)/")
# A bucket, or the host of a store, where a client names no object.
_STORE = re.compile(
    r"(?i)\bbucket[ :='\"]{1,3}(?!(?:does|doesn|has|was|not|or|and|that|you|is|in|path|name|policy|permission)\b)"
    r"([\w.-]{3,255})|(?:\bhost='|\bendpoint URL: \"https?://)([\w.-]{1,255})"
)
_ADDRESS = re.compile(r"(?i)\b(?:to|from|host|peer|tcp|address|connect)\W{1,4}((?:\d{1,3}\.){3}\d{1,3})\b")
# Messages name the source file that they come from; it is no path of the job's.
_SOURCE = re.compile(r"\.(?:cpp|cc|cu|cuh|c|h|hpp|py|pyx|pxi|rs|go|so)(?:\.\d+)*$")
_RANK = re.compile(r"(?i)(?<![\w-])(?:global[ _])?rank[\"' :=#]{1,4}(\d{1,6})\b")
_MAPPED = re.compile(r"(?i)^\[?::ffff:((?:\d{1,3}\.){3}\d{1,3})\]?$")
_ITSELF = re.compile(r"\[?(?:127\.\d|localhost$|localhost\.|::1\]?$|0\.0\.0\.0$|::\]?$|0:0:0:0:0:0:0:[01]$)")


@dataclass(frozen=True, slots=True)
class Blamed:
    """Who is to blame, how sure that is, and what is missing to say it."""

    culprits: tuple[Named, ...]
    confidence: Confidence
    missing: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    root: Told
    row: Row
    told: Sequence[Told]
    heard: frozenset[int]
    sure: Confidence

    @property
    def here(self) -> str:
        return self.root.speaker.node

    def alike(self) -> list[Told]:
        """The root and all that told the same."""
        return [one for one in self.told if one.row.name == self.root.row.name]

    def of_its_kind(self) -> list[Told]:
        """The root, all that told the same, and other rows' lines about the same kind of failure."""
        kind = (self.root.row.cause_class, self.root.row.kind)
        return [one for one in self.told if (one.row.cause_class, one.row.kind) == kind]

    def named(self, *culprits: Named) -> Blamed:
        return Blamed(culprits[:_MOST_CULPRITS], self.sure)


def blamed_in_words(root: Told, row: Row, told: Sequence[Told], heard: frozenset[int]) -> Blamed:
    """Who is to blame for a root, whose row may count as another one.

    Args:
        told: all that was told, in order; ``heard``: ranks that wrote anything.
    """
    case = _Case(root, row, told, heard, "high" if row.role == "cause" else "medium")
    for find in _WAYS[row.blames]:
        found = find(case)
        if found is not None:
            return found
    return Blamed((), case.sure)


def waited_for_in_words(told: Iterable[Told]) -> tuple[Named, ...]:
    """The ranks that all who waited in vain name as those that did not come; nobody where they do not agree."""
    named = [set(ranks_named(one.text)) for one in told if one.row.role == "timeout"]
    common = set[int].intersection(*filter(None, named)) if any(named) else set[int]()
    return tuple(Named(rank) for rank in sorted(common)) if len(common) <= _MOST_CULPRITS else ()


def path_in(text: str) -> str:
    """The address of an object store's object, or the absolute path, that a message is about; empty without one."""
    if found := _URL.search(text):
        return found[0].rstrip(".:")
    paths = (found[0].rstrip(".") for found in _PATH.finditer(text) if not found["line"])
    return next((path for path in paths if path.count("/") > 1 and not _SOURCE.search(path)), "")


def path_beside(lines: Iterable[str], kind: str) -> str:
    """The object, or the file of data or a checkpoint, that one of the lines near an error is about; the first.

    Args:
        kind: of the error: one of writing is not about what was read.
    """
    does = [_WRITES] * (kind not in _OF_READS) + [_READS] * (kind not in _OF_WRITES)
    saved: set[str] = set()
    for text in lines:
        if found := _SAVED.search(text):
            saved.add(found[1].strip("/."))
        if _CODE.search(text) or _DONE.search(text):
            continue
        if kind in _OF_WRITES and (found := _SAVING.search(text)):
            if (path := found[1].rstrip(".")).strip("/.") not in saved:
                return path
            continue
        if found := _DATA_URL.search(text):
            return found[0].rstrip(".:")
        path = path_in(text) if any(words.search(text) for words in does) else ""
        if path.strip("/.") in saved:
            continue
        if path and "://" not in path and not _SYSTEM.match(path) and not _SETTINGS.search(path):
            return path
    return ""


# --- what stands at a place of the text ---------------------------------------------------------------------------


def _nobody(case: _Case) -> Blamed:
    return Blamed((), case.sure)


def _gpu(case: _Case) -> Blamed | None:
    """A GPU by its PCI address; where the driver gives its number only, by the one address in that host's lines."""
    pci, number = (case.root.places.get(name, "") for name in ("pci", "gpu"))
    if pci:
        return case.named(Named(thing=f"GPU {pci.lower()}", node=case.here))
    told = {
        address.lower()
        for one in case.told
        if one.row.blames == "gpu" and one.speaker.node == case.here and (address := one.places.get("pci"))
    }
    if len({address.partition(".")[0] for address in told}) == 1:
        known = f" ({number})" if number else ""
        return case.named(Named(thing=f"GPU {min(told)}{known}", node=case.here))
    return case.named(Named(thing=number, node=case.here)) if number else None


def _gpu_of_speaker(case: _Case) -> Blamed | None:
    """The GPU of the one process that said it, as NCCL's lines begin with it."""
    said = {(one.speaker.node, one.speaker.pid, one.speaker.gpu) for one in case.alike()}
    if len(said) != 1 or case.root.speaker.gpu is None or case.row.kind in _OF_WHOLE_NODES:
        return None
    return case.named(Named(thing=f"GPU {case.root.speaker.gpu}", node=case.here))


def _device(case: _Case) -> Blamed | None:
    device = case.root.places.get("device")
    return case.named(Named(thing=f"device {device}", node=case.here)) if device else None


def _link(case: _Case) -> Blamed | None:
    """Both ends of each link; with many, the end that all of them share. A loopback address names nobody."""
    links = {(one.speaker.node, peer) for one in case.alike() if (peer := _peer(one))}
    if not links:
        noted = _around(case)
        peers, nodes = (
            {one.places[name] for one in noted if name in one.places} for name in ("peer", "node")
        )
        if len(peers) != 1 or len(nodes) > 1:
            return None
        links = {(nodes.pop() if nodes else case.here, peers.pop())}
    links = {(node, peer) for node, peer in links if not _ITSELF.match(peer)}
    if any(not peer.isdecimal() for _, peer in links):  # a name of digits only is told as an address, too
        links = {(node, peer) for node, peer in links if not peer.isdecimal()}
    if len(links) >= _LINKS_OF_ONE:
        nodes, peers = ({link[end] for link in links} for end in (0, 1))
        if len(peers) == 1:
            return case.named(Named(peer=peers.pop()))
        if len(nodes) == 1 and nodes != {""}:
            return case.named(Named(node=nodes.pop()))
    return case.named(*(Named(node=node, peer=peer) for node, peer in sorted(links)))


def _peer(one: Told) -> str:
    """The other end that a text names, at a place of its row or as the only address that it speaks of."""
    addresses = set(_ADDRESS.findall(one.text))
    peer = one.places.get("peer", "") or (addresses.pop() if len(addresses) == 1 else "")
    return _MAPPED.sub(r"\1", peer)


def _path(case: _Case) -> Blamed | None:
    """The file system's path; of many below one folder, the folder. Else the object that the same error names."""
    paths = {path for one in case.alike() if (path := _told_path(one))}
    if not paths:
        block = (case.root.source, case.root.block)
        near = [one.text for one in case.told if (one.source, one.block) == block]
        paths = {found[0].rstrip(".:") for text in near if (found := _URL.search(text))}
    if not paths and (beside := path_beside(case.root.beside, case.row.kind)):
        paths = {beside}
    if not paths:
        return _store(case)
    if len(paths) > 1 and all(path.startswith("/") for path in paths):
        folder = commonpath(paths)
        if folder.count("/") > 1:
            paths = {folder}
    labelled = case.root.speaker.rank is not None
    ranks = _speakers(case) if labelled and case.row.kind in _OF_ONE_MOUNT else None
    return case.named(*(Named(path=path) for path in sorted(paths)), *(ranks.culprits if ranks else ()))


def _store(case: _Case) -> Blamed | None:
    """The bucket or host of a store that the text names: of a connection that broke off, no object is to blame."""
    stores = {found[1] or found[2] for one in case.alike() if (found := _STORE.search(one.text))}
    return case.named(*(Named(thing=f"store {store}") for store in sorted(stores))) if stores else None


def _told_path(one: Told) -> str:
    told = one.places.get("path", "")
    return told if told.startswith("/") or "://" in told else path_in(one.text)


def _node(case: _Case) -> Blamed | None:
    """The node or pod that the text names, or a line of its kind, or a note close to it."""
    for one in (case.root, *case.of_its_kind()):
        if found := _place(one):
            return case.named(found)
    near = {found for one in _around(case) if (found := _place(one))}
    return case.named(near.pop()) if len(near) == 1 else None


def _place(one: Told) -> Named | None:
    """The pod or node at the places of a text; a loopback address is none."""
    if pod := one.places.get("pod"):
        return Named(thing=f"pod {pod}")
    node = one.places.get("node", "")
    return Named(node=node) if node and not _ITSELF.match(node) else None


def _around(case: _Case) -> list[Told]:
    """Notes close to the root: they tell where the process ran."""
    root = case.root
    return [
        one
        for one in case.told
        if one.row.role == "note" and one.source == root.source and abs(one.number - root.number) <= _AROUND
    ]


def _here(case: _Case) -> Blamed | None:
    return case.named(Named(node=case.here)) if case.here else None


def _peer_of_others(case: _Case) -> Blamed | None:
    """The one peer of which others tell that it does not answer, where the line of its adapter names no host."""
    if case.here.strip(".-0123456789"):
        return None
    peers = {
        one.places["peer"] for one in case.told if one.row.cause_class == "network" and "peer" in one.places
    }
    return Blamed((Named(peer=peers.pop()),), "medium") if len(peers) == 1 else None


def _node_of_all(case: _Case) -> Blamed | None:
    """The node on which all are that told the same."""
    nodes = {one.speaker.node for one in case.alike()}
    return _here(case) if len(nodes) == 1 else Blamed((), case.sure)


def _ranks_in_text(case: _Case) -> Blamed | None:
    """All the ranks that the text names."""
    if "rank" not in case.root.places:
        return None
    told = {frozenset(_ranks_of(one)) for one in case.alike()}
    ranks = frozenset[int]().union(*told)
    if case.row.kind == "desync" and len(told) > 1:
        # Of pairs that differ the one who is in all of them is odd.
        ranks = frozenset[int].intersection(*told)
    node = case.root.places.get("node", "") if len(ranks) == 1 else ""
    return case.named(*(Named(rank, node=node) for rank in sorted(ranks)))


def _who_ended(case: _Case) -> Blamed | None:
    """The process whose end, or error, a launcher tells of: nobody where it tells so of most of those it speaks of."""
    told = case.of_its_kind()
    ranks = {rank for one in told for rank in _ranks_of(one)}
    if not ranks and case.root.row.role == "outcome":
        noted = [one for one in _around(case) if "rank" in one.places]
        told += noted
        ranks = {rank for one in noted for rank in _ranks_of(one)}
    if ranks:
        known = case.heard.union(rank for one in case.told for rank in _ranks_of(one))
        if len(ranks) > 1 and 2 * len(ranks) > len(known):
            return Blamed((), "medium")
        nodes = {node for one in told if (node := one.places.get("node"))}
        node = nodes.pop() if len(ranks) == len(nodes) == 1 else ""
        return case.named(*(Named(rank, node=node) for rank in sorted(ranks)))
    processes = {int(one.places["process"]) for one in told if "process" in one.places}
    if processes:
        return case.named(*(Named(process=process) for process in sorted(processes)))
    locals_ = {
        (one.speaker.node, int(one.places["local_rank"])) for one in told if "local_rank" in one.places
    }
    if len(locals_) == 1 or (locals_ and case.root.row.role == "outcome"):
        return case.named(*(Named(local_rank=local, node=node) for node, local in sorted(locals_)))
    return None


def _whose_memory(case: _Case) -> Blamed | None:
    """The task, or its node, that Slurm tells of first after it has told that a memory was full."""
    if case.row.kind != _MEMORY_FULL:
        return None
    after = [one for one in case.told if one.number > case.root.number and one.row.name in _TASKS]
    if not after:
        return None
    first = after[0]
    node, ranks = first.places.get("node", ""), _ranks_of(first)
    if first.row.role == "echo" and len({one.places.get("node") for one in after}) > 1:
        return None
    if first.row.role == "outcome" and len(ranks) == 1:
        return case.named(Named(ranks.pop(), node=node))
    return case.named(Named(node=node)) if node else None


def _rank_in_words(case: _Case) -> Blamed | None:
    """The one rank of which an unlabelled line of a cause speaks, at a place that no row knows."""
    root = case.root
    if root.speaker.rank is not None or case.row.role != "cause":
        return None
    if any(one.count > 1 for one in case.alike()):
        return None  # lines that differ in numbers only are counted, not kept
    ranks = {int(found) for one in case.alike() for found in _RANK.findall(one.text)}
    return case.named(Named(ranks.pop())) if len(ranks) == 1 else None


def _ranks_of(one: Told) -> set[int]:
    """The ranks at the places of a text, as ``3`` or ``0-3,7``; bounded."""
    found = {int(one.places[name]) for name in ("rank", "other_rank") if name in one.places}
    for part in filter(None, one.places.get("ranks", "").replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), int(first) + _MOST_RANKS) + 1))
    return found


# --- who said it --------------------------------------------------------------------------------------------------


def _speakers(case: _Case) -> Blamed | None:
    """Who said the root: nobody where all, or most, say the same."""
    same, root = case.alike(), case.root
    ranks = {one.speaker.rank for one in same if one.speaker.rank is not None}
    if not ranks:
        local = {one.speaker.local_rank for one in same if one.speaker.local_rank is not None}
        if len(local) == 1:
            return case.named(Named(local_rank=local.pop(), node=case.here))
        if found := _gpu_of_speaker(case):
            return found
        # A library writes without a label; the traceback that follows has one, or another line of its kind.
        ranks = {
            one.speaker.rank
            for one in (*case.told, *case.of_its_kind())
            if one.speaker.rank is not None and (one.row.kind == "traceback" or one.row.kind == root.row.kind)
        }
    if not ranks:
        return None
    if len(ranks) == 1:
        if root.row.role == "exception" and _others_raised(ranks, case.told, "rank"):
            return Blamed((), "medium")
        node = root.speaker.node if root.speaker.rank in ranks else ""
        return case.named(Named(ranks.pop(), node=node))
    if 2 * len(ranks) > len(case.heard) or root.time_s is None:
        return Blamed((), "medium")
    first = [one for one in same if one.time_s is not None and one.time_s <= root.time_s + _SAME_MOMENT_S]
    early = {one.speaker.rank for one in first if one.speaker.rank is not None}
    if 2 * len(early) > len(case.heard) or not early:
        return Blamed((), "medium")
    return Blamed(tuple(Named(rank) for rank in sorted(early)[:_MOST_CULPRITS]), "medium")


def _others_raised(who: AbstractSet[int | str], told: Sequence[Told], by: Literal["rank", "node"]) -> bool:
    """Whether other ranks, or nodes, had a traceback of their own: not one of an error that only tells of another."""
    raised = {getattr(one.speaker, by) for one in told if one.row.kind == "traceback"}
    follow = {getattr(one.speaker, by) for one in told if one.row.role in ("echo", "timeout")}
    return bool(raised - follow - who - {None, ""})


def _alone(case: _Case) -> Blamed | None:
    """Who alone said the root, or of whom alone it speaks, where others spoke, too, or were ended by the launcher."""
    speaker = case.root.speaker.rank
    spoken_of = {rank for one in case.alike() for rank in _ranks_of(one)}
    rank = min(spoken_of) if speaker is None and len(spoken_of) == 1 else speaker
    others = case.heard - {rank} or any(_ENDED_BY_LAUNCHER in one.text for one in case.told)
    if rank is None or not others:
        return None
    return case.named(Named(rank)) if speaker is None else _speakers(case)


def _speaking_node(case: _Case) -> Blamed | None:
    """The node that alone tells of its network or hardware, where no rank or other end is known."""
    nodes = {one.speaker.node for one in case.alike()}
    ranks = {one.speaker.rank for one in case.alike()} - {None}
    one_process = "pid=" in case.root.speaker.label and len({one.speaker for one in case.alike()}) == 1
    of_node = case.root.row.cause_class in ("network", "node") or case.root.row.kind == "sigkill"
    others = {one.speaker.node for one in case.told} - {case.here, ""}
    of_node = of_node or (one_process and case.root.row.role == "cause")
    of_node = of_node or (bool(others) and case.row.blames in ("speaker", "alone"))
    if ranks or len(nodes) > 1 or not case.here or not of_node:
        return None
    if case.root.row.role == "exception" and _others_raised({case.here}, case.told, "node"):
        return Blamed((), "medium")
    return Blamed((Named(node=case.here),), "medium")


_WAYS: dict[str, tuple[Callable[[_Case], Blamed | None], ...]] = {
    "nobody": (_nobody,),
    "gpu": (_gpu, _who_ended, _speaking_node),
    "link": (_link, _who_ended),
    "device": (_device, _peer_of_others, _node_of_all),
    "path": (_path, _speakers),
    "store": (_store, _speakers),
    "node": (_node, _who_ended, _here),
    "rank": (_ranks_in_text, _who_ended, _speakers, _speaking_node),
    "process": (_who_ended,),
    "speaker": (_who_ended, _whose_memory, _rank_in_words, _speakers, _node, _speaking_node),
    "alone": (_alone, _speaking_node),
}
"""Where the culprit of a row is looked for, by what the row blames: the first that finds anything is taken."""
