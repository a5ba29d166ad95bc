from collections.abc import Sequence

class Side:
    def __init__(
        self,
        addrs: Sequence[int],
        first: int,
        count: int,
        stride: int,
        block_len: int,
        blocks: Sequence[int] | None = None,
        block: int = 0,
    ) -> None: ...

def expand(side: Side, offset: int = 0, limit: int = ...) -> list[tuple[int, int]]: ...
def pairs(
    source: Side, destination: Side, offset: int = 0, limit: int = ...
) -> list[tuple[int, int, int]]: ...
