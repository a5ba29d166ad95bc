from ucxkv.blocks import BlockList
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
        src_blocks: BlockList | None = None,
        dst_blocks: BlockList | None = None,
        offset: int = 0,
    ) -> None: ...
    def overlaps(self) -> bool: ...
    def run(self) -> int | None: ...
    @property
    def total(self) -> int: ...
