from collections.abc import Mapping, Sequence
from typing import Any

from ucxkv.endpoint import NativeLink
from ucxkv.memory import LocalCache, RemoteCache

ENGINE_LIMITS: dict[str, int]

def silence_ucx() -> None: ...
def monotonic_ns() -> int: ...

class NativeEngine:
    incarnation: int
    rma_address: bytes
    words_rkey: bytes
    def __init__(self, incarnation: int, rma_settings: Mapping[str, str] | None = None) -> None: ...
    def close(self) -> None: ...
    @property
    def words_address(self) -> int: ...
    @property
    def word0(self) -> int: ...
    @property
    def notify_fd(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def ucx_version(self) -> str: ...
    def add_worker(self, settings: Mapping[str, str]) -> int: ...
    def worker_address(self, index: int) -> bytes: ...
    def new_link(self, worker: int) -> NativeLink: ...
    def register(
        self,
        cache_id: int,
        addresses: Sequence[int],
        blocks: int,
        block_bytes: int,
        *,
        readable: bool,
        writable: bool,
        pushable: bool = False,
    ) -> LocalCache: ...
    def new_transfer(self, deadline: int, attended: bool) -> TransferHandle: ...
    def totals(self) -> dict[str, Any]: ...

class TransferHandle:
    def submit(
        self,
        link: NativeLink,
        remote: RemoteCache,
        local: LocalCache,
        *,
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
    ) -> None: ...
    def offer(
        self,
        link: NativeLink,
        remote: RemoteCache,
        local: LocalCache,
        *,
        src_first: int,
        dst_first: int,
        tensors: int,
        tensors_per_layer: int,
        block_len: int,
        src_block: int = 0,
        dst_block: int = 0,
        src_blocks: Any = None,
        dst_blocks: Any = None,
    ) -> None: ...
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
