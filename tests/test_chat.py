"""Chat: every id and mask bit of tiny conversations by hand, prompts that continue exactly, clear errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorl.chat import encode_conversation, encode_prompt, render, reply
from nanorl.tokenizer import SPECIALS, Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CONTENT = st.lists(st.one_of(st.sampled_from(SPECIALS), TEXT), max_size=4).map("".join)
CONVERSATION = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def tok():
    """No merges: each byte is its own id, and the specials are 256..264 in the order of SPECIALS."""
    return Tokenizer.train([], 265)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_conversation_by_hand(tok):
    messages = [
        {"role": "system", "content": "Go"},
        user("1+1"),
        assistant("<think>2</think><answer>2</answer>"),
        user("k"),
        assistant(""),
    ]
    by_hand = [  # (id, mask)
        (257, 0), (71, 0), (111, 0), (260, 0),  # <|system|> G o <|end|>
        (258, 0), (49, 0), (43, 0), (49, 0), (260, 0),  # <|user|> 1 + 1 <|end|>
        (259, 0),  # <|assistant|>
        (261, 1), (50, 1), (262, 1),  # <think> 2 </think>
        (263, 1), (50, 1), (264, 1), (260, 1),  # <answer> 2 </answer> <|end|>
        (258, 0), (107, 0), (260, 0),  # <|user|> k <|end|>
        (259, 0), (260, 1),  # <|assistant|> <|end|>: an empty message is still ended by the assistant
    ]  # fmt: skip
    ids, mask = encode_conversation(tok, messages)
    assert ids == [index for index, _ in by_hand]
    assert mask == [bit for _, bit in by_hand]


def test_prompt_by_hand(tok):
    assert encode_prompt(tok, [user("1")]) == [258, 49, 260, 259]
    assert encode_prompt(tok, [user("1")], think=True) == [258, 49, 260, 259, 261]


def test_reply():
    assert reply("1+1=2", "2") == "<think>1+1=2</think><answer>2</answer>"
    assert reply(None, "2") == "<answer>2</answer>"
    assert reply("", "2") == "<think></think><answer>2</answer>"


@given(CONVERSATION)
def test_mask_is_the_assistant_s_part(tok, messages):
    ids, mask = encode_conversation(tok, messages)
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    trained = [index for index, bit in zip(ids, mask, strict=True) if bit]
    contents = [message["content"] for message in messages if message["role"] == "assistant"]
    assert trained == [index for content in contents for index in [*tok.encode_with_marks(content), 260]]


@given(CONVERSATION)
def test_content_cannot_change_the_structure(tok, messages):
    ids, _ = encode_conversation(tok, messages)
    roles = [index for index in ids if index in (257, 258, 259)]
    assert roles == [tok.special[f"<|{message['role']}|>"] for message in messages]
    assert ids.count(tok.end_of_turn) == len(messages)
    assert tok.end_of_text not in ids
    if all(message["role"] != "assistant" for message in messages):
        assert max(ids) <= 260  # marks typed by a user stay text


@given(CONTENT, TEXT, TEXT)
def test_a_prompt_is_the_start_of_its_conversation(tok, question, reasoning, answer):
    whole, mask = encode_conversation(tok, [user(question), assistant(reply(reasoning, answer))])
    for think in (False, True):
        prompt = encode_prompt(tok, [user(question)], think=think)
        assert whole[: len(prompt)] == prompt
        assert mask == [0] * (len(prompt) - think) + [1] * (len(whole) - len(prompt) + think)


def test_real_vocabulary_gives_the_same_structure(r50k):
    ids, mask = encode_conversation(r50k, [user("Hello world"), assistant("<answer>2</answer>")])
    assert ids == [50_258, 15496, 995, 50_260, 50_259, 50_263, 17, 50_264, 50_260]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_render_shows_every_marker(tok):
    ids, _ = encode_conversation(tok, [user("1+1"), assistant(reply(None, "2"))])
    shown = "<|user|>1+1<|end|>\n<|assistant|><answer>2</answer><|end|>"
    assert render(tok, ids) == shown
    assert render(tok, ids + [tok.pad, 258]) == shown + "\n<|endoftext|><|user|>"
    assert render(tok, []) == ""


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one message, got none"),
        ([user("hi"), {"role": "robot", "content": "x"}], "message 1 has unknown role 'robot'; use one of"),
        ([{"role": ["user"], "content": "x"}], "message 0 has unknown role"),
        ([user(None)], "message 0 .user. has content of <class 'NoneType'>; it must be a str"),
        ([user(b"bytes")], "must be a str"),
        ([{"role": "user"}], 'message 0 must be {"role": ..., "content": ...}'),
        (["hi"], "message 0 must be"),
        ([user("bad \ud800")], "lone surrogate"),
    ],
)
def test_bad_conversations_are_one_line_errors(tok, messages, message):
    for call in (encode_conversation, encode_prompt):
        with pytest.raises(ValueError, match=message) as error:
            call(tok, messages)
        assert "\n" not in str(error.value)


def test_a_prompt_that_shows_the_answer_is_refused(tok):
    with pytest.raises(ValueError, match="cannot end with the assistant's message"):
        encode_prompt(tok, [user("1+1"), assistant("2")])
