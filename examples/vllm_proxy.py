"""A small proxy for disaggregated vLLM servers with UcxKvConnector.

    vllm serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "UcxKvConnector",
        "kv_connector_module_path": "ucxkv.integrations.vllm", "kv_role": "kv_producer"}'
    vllm serve MODEL --port 8200 --kv-transfer-config '{... "kv_role": "kv_consumer"}'
    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each request goes to a prefill server first, for one token, then to a decode server with what the
first one has said about its blocks; both are taken in turn.  If prefill fails, decode computes the
prompt itself.  A client that goes away ends its request at decode, and with it the pull.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
logger = logging.getLogger("vllm_proxy")


class Proxy:
    """Sends requests on their way; `prefill` and `decode` are base URLs."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._session: ClientSession | None = None

    def application(self) -> web.Application:
        """Serves the paths of an OpenAI server."""
        application = web.Application(client_max_size=64 << 20)
        application.router.add_routes([web.post(path, self.handle) for path in PATHS])
        application.cleanup_ctx.append(self._open)
        return application

    async def _open(self, _: web.Application) -> AsyncIterator[None]:
        async with ClientSession(timeout=ClientTimeout(total=None)) as session:
            self._session = session
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request: prefill, then decode, whose answer goes back as it comes."""
        assert self._session is not None
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        params = await self._computed(request.path, body, headers)
        if params is not None:
            body = {**body, "kv_transfer_params": params}
        url = next(self._decode) + request.path
        async with self._session.post(url, json=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _computed(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Have a prompt computed; where its blocks are, or None if that did not work."""
        assert self._session is not None
        first = {
            **body,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        first.pop("stream_options", None)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        url = next(self._prefill) + path
        try:
            async with self._session.post(url, json=first, headers=headers) as answer:
                answer.raise_for_status()
                params = (await answer.json()).get("kv_transfer_params")
                return params if isinstance(params, dict) else None
        except (ClientError, ValueError) as error:
            logger.warning("%s: %s; decode computes the prompt itself", url, error)
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    proxy = Proxy(arguments.prefill, arguments.decode)
    web.run_app(proxy.application(), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
