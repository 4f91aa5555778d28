"""The endpoint by which a program plays a trajectory: its requests are turns, in one growing conversation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from rose.workers.environments.agent_endpoint import AgentEndpoint, RewrittenConversation
from rose.workers.environments.protocol import FirstObservation, Message

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SYSTEM, ASK = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}
ASSISTANT = {"role": "assistant", "content": "=2"}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def request(url: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": "policy", "messages": messages, **more}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/chat/completions", json=body) as answer:
        return await (answer.text() if more.get("stream") else answer.json())


def run(play: Callable[[AgentEndpoint, str], Awaitable[Any]]) -> Any:
    async def with_endpoint() -> Any:
        endpoint = AgentEndpoint()
        try:
            return await play(endpoint, await endpoint.start())
        finally:
            await endpoint.close()

    return asyncio.run(with_endpoint())


async def begun(endpoint: AgentEndpoint, url: str, messages: list[Any], action: str, **more: Any) -> tuple[Any, Any]:
    """Return the first observation, and the answer that the program gets for an action."""
    asked = asyncio.create_task(request(url, messages, **more))
    first = await endpoint.first_observation()
    endpoint.answer(action)
    return first, await asked


def test_first_request_is_the_first_observation_and_the_action_its_answer() -> None:
    first, answer = run(lambda endpoint, url: begun(endpoint, url, [SYSTEM, ASK], "=2", tools=[ADD]))
    messages = (Message(role="system", content="Add."), Message(role="user", content="1+1"))
    assert first == FirstObservation(messages=messages, tools=(ADD,))
    assert answer["choices"] == [{"index": 0, "message": ASSISTANT, "finish_reason": "stop"}]


def test_one_message_of_the_user_is_a_text() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    assert run(lambda endpoint, url: begun(endpoint, url, [user(parts)], "=2"))[0] == "1+\n1"


def test_calls_of_tools_are_read_where_the_request_has_tools() -> None:
    said = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"left": 1}}\n</tool_call>'
    with_tools = run(lambda endpoint, url: begun(endpoint, url, [ASK], said, tools=[ADD]))[1]["choices"][0]
    assert with_tools["finish_reason"] == "tool_calls"
    assert with_tools["message"]["content"] == "Let me see."
    [call] = with_tools["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"left": 1}'}
    without = run(lambda endpoint, url: begun(endpoint, url, [ASK], said))[1]["choices"][0]
    assert without["message"] == {"role": "assistant", "content": said}


@pytest.mark.parametrize("call", ["{", '{"arguments": {}}', '{"name": 3}', "{" * 5000 + "}"])
def test_malformed_call_is_plain_text(call: str) -> None:
    said = f"<tool_call>{call}</tool_call>"
    answer = run(lambda endpoint, url: begun(endpoint, url, [ASK], said, tools=[ADD]))[1]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}


def test_streamed_answer_is_one_event_and_the_end() -> None:
    text = run(lambda endpoint, url: begun(endpoint, url, [ASK], "=2", stream=True))[1]
    event, end, _ = text.split("\n\n")
    assert '"content": "=2"' in event and end == "data: [DONE]"


def test_next_request_shows_its_new_messages() -> None:
    async def play(endpoint: AgentEndpoint, url: str) -> str:
        await begun(endpoint, url, [SYSTEM, ASK], "=2")
        tool = {"role": "tool", "tool_call_id": "call-1", "content": "2"}
        more = asyncio.create_task(request(url, [SYSTEM, ASK, ASSISTANT, tool, user("right")]))
        seen = await endpoint.next_observation()
        endpoint.answer("done")
        await more
        return seen

    assert run(play) == "<tool_response>\n2\n</tool_response>\n\nright"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASK, ASSISTANT, user("right")], "earlier messages changed"),
        ([SYSTEM, ASK, user("right")], "earlier messages changed"),
        ([SYSTEM, ASK, ASSISTANT], "no new message"),
        ([SYSTEM, ASK, ASSISTANT, user("a"), ASSISTANT, user("b")], "other answers"),
        ([SYSTEM, ASK, ASSISTANT, user([{"type": "image_url", "image_url": {"url": "x"}}])], "not text"),
    ],
    ids=["compacted", "without the answer", "nothing new", "two turns", "image"],
)
def test_request_that_does_not_continue_the_conversation_is_refused(messages: list[Any], words: str) -> None:
    async def play(endpoint: AgentEndpoint, url: str) -> None:
        await begun(endpoint, url, [SYSTEM, ASK], "=2")
        asked = asyncio.create_task(request(url, messages))
        try:
            await endpoint.next_observation()
        finally:
            asked.cancel()

    with pytest.raises(RewrittenConversation, match=words):
        run(play)
