from typing import Any

from ucxkv.endpoint import NativeLink
from ucxkv.memory import LocalCache, RemoteCache

class TransferHandle:
    def submit(
        self,
        link: NativeLink,
        remote: RemoteCache,
        local: LocalCache,
        *,
        push: bool,
        get: bool,
        src_first: int,
        dst_first: int,
        tensors: int,
        tensors_per_layer: int,
        block_len: int,
        src_block: int = 0,
        dst_block: int = 0,
        src_blocks: Any = None,
        dst_blocks: Any = None,
        attended: bool = False,
        withheld: bool = False,
        hold: tuple[int, int] | None = None,
        notice: bytes | None = None,
    ) -> None: ...
    def release(self) -> None: ...
    def end(self, status: int, reason: str = "") -> None: ...
    def wait(self, seconds: float | None = None, layer: int = -1, signals: bool = True) -> bool: ...
    def event_fd(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def status(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def get(self) -> bool | None: ...
    @property
    def withheld(self) -> bool: ...
    @property
    def total(self) -> int: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def layers_done(self) -> int: ...
    @property
    def spans(self) -> int: ...
    @property
    def seconds(self) -> float: ...
