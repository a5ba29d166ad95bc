"""What an engine says of itself to its peers."""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING

from ucxkv import auth, wire
from ucxkv.types import LlmRole

if TYPE_CHECKING:
    from ucxkv.endpoint import NativeLink
    from ucxkv.engine import NativeEngine


class Identity:
    """Hellos and attachments of one engine, and the key it proves itself with."""

    def __init__(
        self,
        *,
        cluster_id: int,
        role: LlmRole,
        incarnation: int,
        secret: str | bytes | None,
        native: NativeEngine,
        library: str,
        ucx_version: tuple[int, int, int],
    ) -> None:
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.key = auth.key_of(secret)
        self.role = role
        self._native = native
        self._library = library
        self._ucx = ".".join(map(str, ucx_version))
        self._serials = itertools.count(1)

    def serial(self) -> int:
        """A number higher than all before."""
        return next(self._serials)

    def hello(
        self,
        address: str,
        expected: int | None = None,
        intent: int = wire.LINK,
        link_id: bytes = b"",
    ) -> wire.Hello:
        """A new hello; `address` is the one dialled or listened at."""
        return wire.Hello(
            library=self._library,
            ucx=self._ucx,
            cluster_id=self.cluster_id,
            expected=expected,
            incarnation=self.incarnation,
            serial=self.serial(),
            role=int(self.role),
            address=address[:512],
            nonce=secrets.token_bytes(32),
            chunk_size=self._native.chunk_size,
            secured=self.key is not None,
            intent=intent,
            link_id=link_id,
        )

    def attachment(self, link: NativeLink, worker: int) -> wire.Attach:
        """What a peer has to know of our end of a link."""
        native = self._native
        return wire.Attach(
            slot=link.slot,
            token=link.token,
            am_address=native.worker_address(worker),
            rma_address=native.rma_address,
            words_address=native.words_address,
            words_rkey=native.words_rkey,
            word0=native.word0,
        )
