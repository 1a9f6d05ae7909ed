"""Talking to a trained model: a chat that remembers, or the raw continuation of a text, printed as it is sampled."""

import codecs
from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from nanorl import checkpoint, evaluate, runtime
from nanorl.chat import Message, encode_prompt
from nanorl.config import StageConfig
from nanorl.generate import Sampling, check_prompts, generate
from nanorl.tokenizer import Tokenizer

Print = Callable[[str], None]


class ChatConfig(StageConfig):
    """Whom to talk to, and how it chooses its words."""

    stage: ClassVar[str] = "chat"

    of: Literal[tuple(evaluate.STAGES)] | None = Field(None, description="the stage to talk to; None takes grpo, or "
                                                          "sft where there is no grpo, and pretrain with --raw")
    prompt: str | None = Field(None, description="one prompt, answered at once; None starts a conversation")
    system: str | None = Field(None, description="a system message that opens the conversation")
    raw: bool = Field(False, description="continue the text as it stands, without the chat template")
    think: bool = Field(False, description="open each reply with <think>, so that the model is made to reason")
    greedy: bool = Field(False, description="always the likeliest token, whatever the temperature")
    temperature: float = Field(0.7, ge=0, description="sampling temperature; 0 is greedy")
    top_k: int = Field(0, ge=0, description="choose among the k likeliest tokens; 0 does not limit")
    top_p: float = Field(1.0, gt=0, le=1, description="choose among the likeliest tokens that hold this probability")
    max_new_tokens: int = Field(128, ge=1, description="longest reply in tokens")


class Talk:
    """A model and what has been said so far.

    `say(text, out)` returns the reply, after handing it to `out` piece by piece as it is sampled. Raises ValueError
    for a text that does not fit the context, and is then as if it had not been called.
    """

    def __init__(self, cfg: ChatConfig):
        """Load the model: FileNotFoundError, with the command that helps, where it is not there."""
        self.cfg = cfg
        self.stage = cfg.of or default_stage(cfg)
        self.model, self.tokenizer, _ = checkpoint.parent_of(cfg, self.stage)
        self.model.to(runtime.pick_device(cfg.device))
        self.messages: list[Message] = []
        self.turn = 0
        self.forget()

    def forget(self) -> None:
        """Start the conversation over."""
        self.messages = [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []

    def say(self, text: str, out: Print) -> str:
        """The reply to `text`, or its continuation with `raw`."""
        cfg, tokenizer = self.cfg, self.tokenizer
        if cfg.raw:
            # in the training text an end token stands before each document
            prompt, opening = [tokenizer.end_of_text, *tokenizer.encode(text)], ""
        else:
            messages = self._remembered([*self.messages, {"role": "user", "content": text}])
            prompt, opening = self._encoded(messages), "<think>" if cfg.think else ""
        check_prompts([prompt], 1, self.model.cfg)
        pieces = Pieces(tokenizer, out)
        out(opening)
        with runtime.autocast(self.model.device, cfg.precision):
            done = generate(
                self.model, [prompt], Sampling(cfg.max_new_tokens, 0 if cfg.greedy else cfg.temperature, cfg.top_k,
                                               cfg.top_p),
                tokenizer.end_of_text if cfg.raw else tokenizer.end_of_turn, tokenizer.pad,
                generator=runtime.generator(cfg.seed, self.turn), on_token=pieces,
            )
        pieces.finish()
        reply = opening + tokenizer.decode(done.responses[0, : done.lengths[0]].tolist())
        self.turn += 1
        if not cfg.raw:
            self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def _encoded(self, messages: list[Message]) -> list[int]:
        return encode_prompt(self.tokenizer, messages, think=self.cfg.think)

    def _remembered(self, messages: list[Message]) -> list[Message]:
        """The messages without the oldest exchanges, as far as these leave no room for a whole reply."""
        room = self.model.cfg.context_length - self.cfg.max_new_tokens
        system = [m for m in messages[:1] if m["role"] == "system"]
        rest = messages[len(system) :]
        while len(rest) > 1 and len(self._encoded(system + rest)) > room:
            rest = rest[2:]
        return system + rest


class Pieces:
    """Token by token to text: called with each token, hands whole characters to `out` as soon as they are whole."""

    def __init__(self, tokenizer: Tokenizer, out: Print):
        self.tokenizer, self.out = tokenizer, out
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, token: int) -> None:
        if self.tokenizer.decode([token]):  # not one of those that stand for no text
            self.out(self.decoder.decode(self.tokenizer.decode_bytes([token])))

    def finish(self) -> None:
        """Hand over what is left of a character that was cut off."""
        self.out(self.decoder.decode(b"", final=True))


def default_stage(cfg: ChatConfig) -> str:
    """The stage to talk to where none is named; FileNotFoundError, with the command that helps, where none is done."""
    for stage in ("pretrain", "sft", "grpo") if cfg.raw else ("grpo", "sft"):
        if evaluate.is_finished(cfg, stage):
            return stage
    return "pretrain" if cfg.raw else "sft"  # loading it says what is missing


def talk(cfg: ChatConfig) -> None:
    """Answer `cfg.prompt`, or whoever is at the keyboard until an empty line or the end of input."""
    def out(text: str) -> None:
        print(text, end="", flush=True)

    session = Talk(cfg)
    if cfg.prompt is not None:
        session.say(cfg.prompt, out)
        print()
        return
    print(f"{session.stage} of run {cfg.run_name}; /new starts over, an empty line ends")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        if not text:
            return
        if text == "/new":
            session.forget()
            continue
        try:
            session.say(text, out)
            print()
        except ValueError as error:
            print(f"error: {error}")
