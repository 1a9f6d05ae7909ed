"""Conversations to token ids and a loss mask, prompts to token ids, and ids back to something readable.

A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": str}. Each becomes

    <|role|> content <|end|>

with nothing between messages. Role markers and <|end|> are special ids that no content can produce; only in
the assistant's content do <think>, </think>, <answer> and </answer> become special ids.
Truncation is the caller's business. Simplified: one fixed template, no tools, no per-model templates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanorl.tokenizer import Tokenizer

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Ids (T,) and a mask (T,) that is 1 on what the assistant has to produce: its content and its <|end|>.

    <|user|> 2 <|end|> <|assistant|> 4 <|end|>
       0     0   0          0        1   1
    Raises ValueError if there are no messages, or one is not a known role with a text.
    """
    ids: list[int] = []
    mask: list[int] = []
    for role, content in _checked(messages):
        encode = tokenizer.encode_with_marks if role == "assistant" else tokenizer.encode
        body = [*encode(content), tokenizer.end_of_turn]
        ids += [tokenizer.special[f"<|{role}|>"], *body]
        mask += [0] + [int(role == "assistant")] * len(body)
    return ids, mask


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], think: bool = False) -> list[int]:
    """Ids (T,) of the messages and the <|assistant|> marker: the model writes on from there.

    With `think` the prompt also ends in <think>, so that the model is made to reason.
    Raises ValueError as `encode_conversation`, and if the last message is the assistant's: the model would
    see an answer before it is asked for one.
    """
    ids, _ = encode_conversation(tokenizer, messages)
    if messages[-1]["role"] == "assistant":
        raise ValueError("a prompt cannot end with the assistant's message; leave the last message out")
    ids.append(tokenizer.special["<|assistant|>"])
    if think:
        ids.append(tokenizer.special["<think>"])
    return ids


def reply(reasoning: str | None, answer: str) -> str:
    """The assistant's content: "<think>2+2=4</think><answer>4</answer>", without the thought if None."""
    thought = "" if reasoning is None else f"<think>{reasoning}</think>"
    return f"{thought}<answer>{answer}</answer>"


def render(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Readable text of ids with every marker shown, one message a line."""
    lines: list[list[int]] = [[]]
    for index in map(int, ids):
        lines[-1].append(index)
        if index == tokenizer.end_of_turn:
            lines.append([])
    return "\n".join(tokenizer.decode(line, keep_ends=True) for line in lines if line)


def check_messages(messages: Sequence[Message]) -> None:
    """ValueError that says what is wrong with which message, where something is."""
    for _ in _checked(messages):
        pass


def _checked(messages: Sequence[Message]) -> Iterable[tuple[str, str]]:
    """Yield (role, content) of each message, or raise a ValueError that says what is wrong with which."""
    if not messages:
        raise ValueError("a conversation needs at least one message, got none")
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(f"a conversation is a list of messages, got {type(messages).__name__} {messages!r:.40}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'message {number} must be {{"role": ..., "content": ...}}, got {message!r:.80}')
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {number} has unknown role {role!r:.80}; use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} ({role}) has content of {type(content)}; it must be a str")
        yield role, content
