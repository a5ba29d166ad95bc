"""The work that every peer is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """`wanted` of the `blocks` blocks of each of `tensors` tensors are pulled at a time.

    Pulls of a small one are repeated `count` times in a turn, each after a `pause` of some seconds.
    """

    name: str
    tensors: int
    blocks: int
    block_bytes: int
    wanted: int
    count: int = 1
    pause: float = 0.0

    @property
    def latency(self) -> bool:
        """Whether it is its latency that matters."""
        return self.count > 1

    @property
    def bytes(self) -> int:
        """Bytes of one pull."""
        return self.tensors * self.wanted * self.block_bytes

    @property
    def spans(self) -> int:
        """Pieces of one pull that lie apart."""
        return self.tensors * self.wanted


WORKS = (
    Work("W1", tensors=64, blocks=1, block_bytes=2 << 20, wanted=1),
    Work("W2", tensors=64, blocks=256, block_bytes=32 << 10, wanted=64),
    Work("W3", tensors=61, blocks=1024, block_bytes=4 << 10, wanted=256),
    Work("4K", tensors=1, blocks=256, block_bytes=4 << 10, wanted=1, count=200),
    # As a pull comes that nobody has expected: caches are cold, and whoever sleeps has to wake up.
    Work("4K-now", tensors=1, blocks=256, block_bytes=4 << 10, wanted=1, count=50, pause=0.002),
)
# The same shapes at a size for trying the script out.
TINY_WORKS = (
    Work("W1", tensors=4, blocks=1, block_bytes=64 << 10, wanted=1),
    Work("W2", tensors=4, blocks=16, block_bytes=32 << 10, wanted=4),
    Work("W3", tensors=5, blocks=64, block_bytes=4 << 10, wanted=16),
    Work("4K", tensors=1, blocks=16, block_bytes=4 << 10, wanted=1, count=20),
    Work("4K-now", tensors=1, blocks=16, block_bytes=4 << 10, wanted=1, count=5, pause=0.002),
)
