"""NIXL, with its UCX backend and its progress thread, as its users have it.

Descriptors and the transfer are prepared once and posted again for each pull: the least it can
cost.  Completion is polled for, since it offers no other way to wait.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from peers import sides


class _Agent(sides.Side):
    def _start(self, name: str) -> None:
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))

    def _register(self) -> None:
        nbytes = self.work.blocks * self.work.block_bytes
        ranges = [(int(address), nbytes, 0, "") for address in self._addresses()]
        self._regions = self._agent.register_memory(ranges, "DRAM")

    def _descriptors(self, addresses: np.ndarray) -> np.ndarray:
        made = np.zeros((len(addresses), 3), dtype=np.uint64)
        made[:, 0] = addresses
        made[:, 1] = self.work.block_bytes
        return made


class Owner(_Agent, sides.Owner):
    def open(self) -> dict[str, Any]:
        self._start("owner")
        return {}

    def _map(self) -> dict[str, Any]:
        self._register()
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"tensors": self._addresses().tolist(), "metadata": metadata}


class Puller(_Agent, sides.Puller):
    def open(self, offer: dict[str, Any]) -> None:
        self._start("puller")

    def _map(self, offer: dict[str, Any]) -> None:
        self._register()
        agent = self._agent
        peer = agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        source, destination = self._blocks()
        remote = np.array(offer["tensors"], dtype=np.uint64)
        here = self._descriptors(self._span_addresses(self._addresses(), destination))
        there = self._descriptors(self._span_addresses(remote, source))
        everything = np.arange(len(here), dtype=np.int32)
        self._lists = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
            agent.prep_xfer_dlist(peer, there, "DRAM"),
        )
        self._transfer = agent.make_prepped_xfer(
            "READ", self._lists[0], everything, self._lists[1], everything
        )

    def pull(self) -> None:
        agent, transfer = self._agent, self._transfer
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {state}")
