"""The fault matrix: its dimensions, the cells that make sense, what may come of each, and samples.

"Peer" is the process that the operation is about: it owns what is pulled, or receives what is
pushed.  "Caller" is the one whose call is watched.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BEFORE_LINK, HELLO, IDLE = "before link", "during hello", "idle"
FIRST_BYTE, MIDDLE, LAST_LAYER = "before the first byte", "mid-transfer", "at the last layer"
FENCE, UNLINK = "during the fence", "during unlink"
UNREGISTER, FINALIZE = "during unregister", "during finalize"
POINTS = (
    *(BEFORE_LINK, HELLO, IDLE, FIRST_BYTE, MIDDLE),
    *(LAST_LAYER, FENCE, UNLINK, UNREGISTER, FINALIZE),
)

KILL, STOP = "SIGKILL", "SIGSTOP, then resumed"
CUT_CONTROL, CUT_DATA, CUT_BOTH = "control cut", "data cut", "both cut"
LOSS, SOME_LOSS, DELAY = "100 % loss", "30 % loss", "200 ms delay, jitter"
NARROW, REORDERED = "1 Mbit", "reordering"
DISK, DESCRIPTORS, MEMORY = "full disk for logs", "no descriptors", "no memory to register"
MEMLOCK, CLOCK = "RLIMIT_MEMLOCK", "clock steps"
FAULTS = (
    *(KILL, STOP, CUT_CONTROL, CUT_DATA, CUT_BOTH),
    *(LOSS, SOME_LOSS, DELAY, NARROW, REORDERED),
    *(DISK, DESCRIPTORS, MEMORY, MEMLOCK, CLOCK),
)

PULL, BLOCKS, PUSH, ASYNC, NOTICE = "pull", "blocks", "push", "async", "notice"
OPERATIONS = (PULL, BLOCKS, PUSH, ASYNC, NOTICE)
PATHS = ("stream", "get")

UNLINKED = (BEFORE_LINK, HELLO)
# Nothing of the transfer has arrived when the fault comes.
EARLY = (BEFORE_LINK, HELLO, IDLE, FIRST_BYTE)
CUTS = (CUT_CONTROL, CUT_DATA, CUT_BOTH)
# Under these an operation may take longer than it is worth to wait for.
STRANGLING = (STOP, LOSS, SOME_LOSS, DELAY, NARROW)

Ends = frozenset[str]
OK: Ends = frozenset({"ok"})
TIMEOUT: Ends = frozenset({"LlmTimeout"})
# The link went down under the operation, or was down before it.
DOWN: Ends = frozenset({"LlmError", "NotYetLink"})


class Cell(NamedTuple):
    point: str
    fault: str
    operation: str
    path: str

    def __str__(self) -> str:
        return " | ".join(self)

    @property
    def pushes(self) -> bool:
        return self.operation == PUSH

    @property
    def alone(self) -> bool:
        """Whether the operation, once linked, needs neither the peer nor the network: a one-sided
        read of memory on the same host."""
        return self.path == "get" and self.operation in (PULL, BLOCKS, ASYNC)


DIMENSIONS: tuple[tuple[str, ...], ...] = (POINTS, FAULTS, OPERATIONS, PATHS)


def senseless(cell: Cell) -> str:
    """Why there is no such cell; "" if there is."""
    if cell.point == BEFORE_LINK and cell.fault in CUTS:
        return "before there is a link there is no connection to cut"
    if cell.point == HELLO and cell.fault in (CUT_DATA, CUT_BOTH):
        return "during the hello there is a control connection only"
    return ""


def every_cell() -> list[Cell]:
    cells = [Cell(*values) for values in itertools.product(*DIMENSIONS)]
    return [cell for cell in cells if not senseless(cell)]


def links_allowed(cell: Cell) -> Ends:
    """What may come of linking, where the fault comes before or during it."""
    if cell.fault in (KILL, STOP, LOSS, DELAY, *CUTS):
        return frozenset({"LinkFailed"})
    if cell.fault == DESCRIPTORS and cell.point == BEFORE_LINK:
        return frozenset({"LinkFailed"})
    if cell.fault in (SOME_LOSS, NARROW, DESCRIPTORS):
        return frozenset({"ok", "LinkFailed"})
    return OK


def allowed(cell: Cell, *, linked: bool = True) -> Ends:
    """What may come of the operation; `linked` tells whether there was a link when it began."""
    if not linked:
        return frozenset({"NotYetLink"})
    if cell.fault == KILL:
        # Whatever had not come is lost, and a transfer may be over just before.
        ends = DOWN if cell.point in EARLY else DOWN | OK
    elif cell.fault in (STOP, LOSS):
        ends = OK
        if not cell.alone:
            ends = TIMEOUT if cell.point in EARLY else TIMEOUT | OK
    elif cell.fault in (SOME_LOSS, DELAY, NARROW):
        ends = OK if cell.alone else OK | TIMEOUT
        # What takes longer than the deadline even if nothing else goes wrong.
        hopeless = cell.path == "stream" or (cell.fault == DELAY and cell.point != FIRST_BYTE)
        if cell.fault != SOME_LOSS and hopeless and not cell.alone and cell.point in EARLY:
            ends = TIMEOUT
    else:
        ends = OK
    if cell.point == FENCE:
        ends |= TIMEOUT | OK
    elif cell.point == UNLINK:
        ends |= DOWN | OK
    elif cell.point == FINALIZE:
        # A one-sided read finds the cache gone before anybody tells that the engine is.
        ends |= DOWN | {"KvCacheNotExist"} | OK
    elif cell.point == UNREGISTER:
        ends |= {"KvCacheNotExist"} | OK
    if cell.point in (UNREGISTER, FINALIZE) and cell.operation == NOTICE:
        # The holds of a cache end before it does.
        ends |= {"HoldEnded"}
    return ends


def _pairs(cell: Cell) -> Iterator[tuple[int, str, int, str]]:
    for (one, left), (other, right) in itertools.combinations(enumerate(cell), 2):
        yield one, left, other, right


def pairwise(cells: Sequence[Cell], seed: int = 1) -> list[Cell]:
    """Cells in which any two values of two dimensions that come together at all do so at least
    once: greedily, each time one that shows most pairs that have not been shown."""
    left = {pair for cell in cells for pair in _pairs(cell)}
    pool = list(cells)
    random.Random(seed).shuffle(pool)
    sample = []
    most = len(DIMENSIONS) * (len(DIMENSIONS) - 1) // 2
    while left:
        best, found = None, 0
        for cell in pool:
            count = sum(pair in left for pair in _pairs(cell))
            if count > found:
                best, found = cell, count
            if found == most:
                break
        assert best is not None
        most = found
        left.difference_update(_pairs(best))
        sample.append(best)
    order = {cell: number for number, cell in enumerate(cells)}
    return sorted(sample, key=lambda cell: (cell.path, order[cell]))
