from typing import Any

from ucxkv.memory import LocalCache

class Copy:
    def __init__(
        self,
        source: LocalCache,
        target: LocalCache,
        *,
        src_first: int,
        dst_first: int,
        tensors: int,
        block_len: int,
        src_block: int = 0,
        dst_block: int = 0,
        src_blocks: Any = None,
        dst_blocks: Any = None,
        offset: int = 0,
    ) -> None: ...
    def overlaps(self) -> bool: ...
    def run(self) -> int | None: ...
    @property
    def total(self) -> int: ...
