"""An OpenAI-compatible endpoint by which a program plays one trajectory: each of its requests is one turn.

Keeps true
- A request waits until the policy's action answers it, however long that takes.
- The conversation only grows: a request repeats the messages of the request before, then the answer, then new messages.
  Any other request is refused with a reason, because a context could not grow by what was sampled.
- The endpoint listens on this machine alone, under a path that only its trajectory knows, and ends with it.

Example:
    POST /v1/chat/completions [system, user]                      -> the first observation
    the action `=12` answers it
    POST /v1/chat/completions [system, user, assistant `=12`, user] -> the next observation is the last message
"""

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from rose.workers.environments.protocol import FirstObservation, Message

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A call of a function as Hermes, Qwen and others write it."""

MAX_REQUEST_BYTES = 1 << 24


class RewrittenConversation(Exception):
    """A request that does not continue the conversation."""


class AgentEndpoint:
    """The endpoint of one trajectory. Used in one event loop."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None
        self._turn = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._calls = 0
        self.messages: list[tuple[str, str]] = []
        """Role and text of every message of the newest request."""

    async def start(self) -> str:
        """Listen; return the base URL."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        secret = secrets.token_urlsafe(16)
        app.router.add_post(f"/{secret}/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/{secret}/v1"

    async def close(self) -> None:
        """End all requests and stop listening."""
        if self._answer is not None and not self._answer.done():
            self._answer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def answer(self, action: str) -> None:
        """Answer the request that waits."""
        assert self._answer is not None
        self._answer.set_result(action)

    async def first_observation(self) -> str | FirstObservation:
        """Wait for the first request; return its messages and tools."""
        body = await self._requests.get()
        self.messages = [_read(message) for message in body["messages"]]
        messages = tuple(Message(role=role, content=text) for role, text in self.messages)
        tools = tuple(body.get("tools") or ())
        if len(messages) == 1 and messages[0].role == "user" and not tools:
            return messages[0].content
        return FirstObservation(messages=messages, tools=tools)

    async def next_observation(self) -> str:
        """Wait for the next request; return its new messages. Raises RewrittenConversation."""
        body = await self._requests.get()
        before, now = self.messages, [_read(message) for message in body["messages"]]
        new = now[len(before) + 1 :]
        if now[: len(before)] != before or [role for role, _ in now[len(before) : len(before) + 1]] != ["assistant"]:
            raise RewrittenConversation("a request does not repeat the conversation so far: earlier messages changed")
        if not new or any(role == "assistant" for role, _ in new):
            raise RewrittenConversation("a request has no new message behind the policy's answer, or other answers")
        self.messages = now
        return "\n\n".join(
            f"<tool_response>\n{text}\n</tool_response>" if role == "tool" else text for role, text in new
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise web.HTTPBadRequest(text="no chat completion request")
        async with self._turn:
            self._answer = asyncio.get_running_loop().create_future()
            self._requests.put_nowait(body)
            action = await self._answer
        message, reason = self._message(action, has_tools=bool(body.get("tools")))
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "rose", "created": 0, "model": body.get("model", ""), "usage": usage}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**answer, "object": "chat.completion", "choices": [choice]})
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = json.dumps({**answer, "object": "chat.completion.chunk", "choices": [choice]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def _message(self, action: str, *, has_tools: bool) -> tuple[dict[str, Any], str]:
        """Return the assistant's message for an action, and why it ends."""
        calls = [call for text in CALL.findall(action) if (call := _call(text)) is not None] if has_tools else []
        if not calls:
            return {"role": "assistant", "content": action}, "stop"
        numbered = []
        for call in calls:
            self._calls += 1
            numbered.append({"id": f"call-{self._calls}", "type": "function", "function": call})
        return {"role": "assistant", "content": CALL.sub("", action).strip(), "tool_calls": numbered}, "tool_calls"


def _call(text: str) -> dict[str, str] | None:
    """Return name and arguments of a call; None if the text is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": call["name"], "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _read(message: Any) -> tuple[str, str]:
    """Return role and text of a message. Raises RewrittenConversation for one that is not text."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise RewrittenConversation("a message has a part that is not text")
        content = "\n".join(part["text"] for part in content)
    return str(message.get("role")), str(content or "")
