"""kv_transfer_params: what a prefill engine says of a request's blocks, and decode reads.

They pass through the application, as JSON, with the keys that vLLM's proxies know (`do_remote_...`,
`remote_...`); the key "ucxkv" has what this connector adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

Params: TypeAlias = Mapping[str, Any]


class RankSource(msgspec.Struct, frozen=True):
    """The part of one tensor-parallel rank: its engine, its cache, and its hold of the blocks."""

    cluster: int
    host: str
    port: int
    cache: int
    hold: str


class Source(msgspec.Struct, frozen=True):
    """Where the blocks of a request are."""

    request_id: str
    compatibility: str
    factors: dict[str, Any]
    ranks: tuple[RankSource, ...]


class RemoteRequest(msgspec.Struct, frozen=True):
    """A request that another engine has computed: its blocks in order, and its tokens in them."""

    source: Source
    blocks: tuple[int, ...]
    tokens: int


def wants_prefill_only(params: Params | None) -> bool:
    """Whether the blocks of this request are to be handed to another engine."""
    return bool(params and params.get("do_remote_decode"))


def was_prefilled(params: Params | None) -> bool:
    """Whether the blocks of this request are in another engine."""
    return bool(params and params.get("do_remote_prefill"))


def write_params(request: RemoteRequest, engine_id: str) -> dict[str, Any]:
    """The parameters that let another engine pull the blocks of `request`."""
    source = request.source
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": source.request_id,
        "remote_block_ids": list(request.blocks),
        "remote_num_tokens": request.tokens,
        "tp_size": len(source.ranks),
        "ucxkv": {
            "compatibility": source.compatibility,
            "factors": source.factors,
            "ranks": [msgspec.to_builtins(rank) for rank in source.ranks],
        },
    }


def read_params(params: Params) -> RemoteRequest:
    """What `write_params` has written; ValueError for anything else."""
    try:
        ours = params["ucxkv"]
        given = {
            "source": {
                "request_id": params["remote_request_id"],
                "compatibility": ours["compatibility"],
                "factors": ours["factors"],
                "ranks": ours["ranks"],
            },
            "blocks": params["remote_block_ids"],
            "tokens": params["remote_num_tokens"],
        }
        return msgspec.convert(given, RemoteRequest)
    except KeyError as error:
        raise ValueError(f"kv_transfer_params have no {error}") from None
    except (TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"kv_transfer_params are not those of UcxKvConnector: {error}") from None
