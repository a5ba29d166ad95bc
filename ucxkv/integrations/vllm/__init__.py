"""A KV connector for vLLM: prefill and decode in different engines.

vLLM loads it out of tree, by its configuration::

    KVTransferConfig(
        kv_connector="UcxKvConnector",
        kv_connector_module_path="ucxkv.integrations.vllm",
        kv_role="kv_both",  # or kv_producer (prefill), kv_consumer (decode)
        kv_connector_extra_config={"hold_seconds": 60},  # see ConnectorSettings
    )

A request with ``kv_transfer_params={"do_remote_decode": True}`` is computed and its blocks are
held; the ``kv_transfer_params`` of its output go with the same prompt to another engine, which
pulls the blocks instead of computing them.

Written for the V1 connector interface of vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucxkv.integrations.vllm.connector import UcxKvConnector as UcxKvConnector

__all__ = ["UcxKvConnector"]


def __getattr__(name: str) -> Any:
    # The parts that know nothing of vLLM can be imported where it is not installed.
    if name == "UcxKvConnector":
        from ucxkv.integrations.vllm.connector import UcxKvConnector

        return UcxKvConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
