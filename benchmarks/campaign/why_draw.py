"""What each seed of ``why-live`` and ``why-vain`` does, and what is then true. Nothing of it is told to keepstep."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.campaign.chances import drawn, kind_of

LIVE, VAIN = "why-live", "why-vain"
HOSTS = ("node-a", "node-b")
ANY_NODE = "*"  # Stands for the only host of a job, whatever it is called.


@dataclass(frozen=True)
class Kind:
    """A kind of failure.

    Attributes:
        classes: classes of cause that are right; ``kinds``: finer kinds that are.
        blames: "rank": the rank of the seed; "first": rank 0; "writer": nobody, or who met it; "link": the two hosts;
            "nobody": whoever is named is wrong.
        ways: what the seed draws from besides.
        hosts: numbers of hosts it may run on.
        needs: what must be there: "root", "fuse", "memory cgroup".
        lasts_s: seconds after which the job is ended, where it does not end by itself.
        silent: it is right to open no incident at all.
    """

    classes: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    blames: str = "rank"
    ways: tuple[str, ...] = ("",)
    hosts: tuple[int, ...] = (1, 2)
    needs: tuple[str, ...] = ()
    lasts_s: float = 0.0
    silent: bool = False


_USER, _STORAGE, _NODE = ("user",), ("storage",), ("node",)
KINDS = {
    "exception": Kind(
        _USER,
        ("exception", "shape", "assertion", "nan"),
        ways=("ValueError", "KeyError", "RuntimeError", "AssertionError"),
    ),
    "import": Kind(_USER, ("import", "library-missing"), "nobody", ways=("no module", "no name")),
    "syntax": Kind(_USER, ("syntax",), "nobody"),
    "shape": Kind(_USER, ("shape", "exception"), "nobody"),
    "gpu memory": Kind(_USER, ("gpu-oom",)),
    "watchdog, illegal access": Kind(("user", "node"), ("illegal-access",)),
    "watchdog, ECC": Kind(_NODE, ("gpu-ecc",)),
    "segfault": Kind(_USER, ("segv", "native-crash")),
    "OOM killer": Kind(_NODE, ("host-oom", "cpu-memory"), hosts=(1,), needs=("root", "memory cgroup")),
    "disk full": Kind(
        _STORAGE,
        ("no-space", "checkpoint-failed", "io-error"),
        "writer",
        ways=("torch.save", "write"),
        needs=("root",),
    ),
    "disk full, all": Kind(
        _STORAGE, ("no-space", "checkpoint-failed", "io-error"), "nobody", needs=("root",)
    ),
    "quota": Kind(
        _STORAGE, ("quota", "checkpoint-failed"), "writer", ways=("write",), needs=("root", "fuse")
    ),
    "no mount": Kind(
        _STORAGE, ("missing-path", "not-mounted", "missing-file"), "writer", ways=("torch.save", "write")
    ),
    "mount lost": Kind(
        _STORAGE, ("not-mounted", "io-error", "stale-handle"), "writer", needs=("root", "fuse")
    ),
    "storage stalls": Kind(
        _STORAGE,
        ("stuck-in-kernel", "storage-timeout", "io-error"),
        "writer",
        needs=("root", "fuse"),
        lasts_s=40,
    ),
    "port taken": Kind(("user", "network"), ("port-in-use",), "first"),
    "link cut": Kind(("network",), (), "link", hosts=(2,), needs=("root",), lasts_s=40),
    "desync": Kind(_USER, ("desync",), ways=("operation", "size"), lasts_s=40),
    "loader killed": Kind(("node", "user", "other"), ()),
    "time limit": Kind(
        ("other",), ("time-limit", "preempted"), "nobody", ways=("TERM", "USR1, TERM"), silent=True
    ),
    "Xid": Kind(_NODE, ("gpu-ecc", "gpu-faulty", "gpu-xid"), ways=("48", "95")),
}
# What a restart cannot mend, and the restarts that may be made: none where the program does not even begin.
VAIN_KINDS = {"exception": 1, "import": 0, "syntax": 0, "shape": 1}


@dataclass(frozen=True)
class Why:
    """One seed: what fails, where, and how the job is run."""

    seed: int
    kind: str
    way: str
    ranks: int
    hosts: int
    stream: str  # "console" or "files"
    max_restarts: int
    rank: int
    step: int
    steps: int

    @property
    def rules(self) -> Kind:
        return KINDS[self.kind]

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts

    @property
    def host(self) -> str:
        """The host on which the rank of the seed is."""
        return HOSTS[self.rank // self.per_host] if self.hosts > 1 else ""


@dataclass(frozen=True)
class Truth:
    """What a verdict is compared with.

    Attributes:
        classes: of which one is right; ``kinds``: likewise, any where there are none.
        culprits: sets of ranks, each of which is right by itself.
        link: nodes between which the path is to blame; naming it is right, too.
        node: naming this node in place of the rank is right, too.
        erring: ranks that fail by themselves: whoever else is named is a victim.
        path: what a verdict on storage should tell.
        silent: no incident is right.
    """

    classes: tuple[str, ...]
    kinds: tuple[str, ...]
    culprits: tuple[tuple[int, ...], ...]
    link: tuple[str, ...] = ()
    node: str = ""
    erring: tuple[int, ...] = ()
    path: bool = False
    silent: bool = False


def draw(seed: int) -> Why:
    """The seed's own failure."""
    return _drawn(LIVE, seed, KINDS, (0, 0, 0, 0, 0, 0, 0, 1))


def draw_vain(seed: int) -> Why:
    """The seed's own failure, with restarts to spare."""
    return _drawn(VAIN, seed, VAIN_KINDS, (5,))


def _drawn(case: str, seed: int, kinds: Collection[str], restarts: tuple[int, ...]) -> Why:
    kind = kind_of(case, seed, kinds)
    chance, rules = drawn(case, seed), KINDS[kind]
    ranks = chance.choice((4, 4, 4, 4, 4, 4, 4, 8))
    hosts = chance.choice((1, 1, 2))
    if hosts not in rules.hosts:
        hosts = rules.hosts[0]
    rank = chance.randrange(ranks)
    if rules.blames == "first":
        rank = 0
    step = chance.randint(5, 15)
    return Why(
        seed=seed,
        kind=kind,
        way=kind_of(f"{case}:{kind}", seed // len(kinds), rules.ways),
        ranks=ranks,
        hosts=hosts,
        stream=chance.choice(("console", "files")),
        max_restarts=chance.choice(restarts),
        rank=rank,
        step=step,
        steps=400,
    )


def truth_of(why: Why) -> Truth:
    """What is true of a seed."""
    rules, own, everybody = why.rules, (why.rank,), tuple(range(why.ranks))
    culprits: dict[str, tuple[tuple[int, ...], ...]] = {
        "rank": (own,),
        "first": ((), own),
        "writer": ((), own),
        "link": ((),),
        "nobody": ((),),
    }
    erring = {"rank": own, "first": own, "writer": own, "link": ()}.get(rules.blames, everybody)
    return Truth(
        classes=rules.classes,
        kinds=rules.kinds,
        culprits=culprits[rules.blames],
        link=HOSTS if rules.blames == "link" else (),
        node=(why.host or ANY_NODE) if rules.classes == _NODE else "",
        erring=() if rules.silent else erring,
        path=rules.classes == _STORAGE,
        silent=rules.silent,
    )
