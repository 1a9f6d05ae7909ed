"""Text to token ids and back: byte-level BPE trained by hand, wrapped as a fast `tiktoken.Encoding`.

Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) over bytes, as in GPT-2 (Radford et al. 2019):
1. a pattern cuts text into words (" cat", "7", "...", "\n"), and no token ever crosses a cut;
2. `train_bpe` counts the words once, then joins the most frequent neighbouring pair of tokens, over and over;
3. the joined tokens in order of birth, the "ranks", are all that `tiktoken` needs to encode.

Ids: the ranks come first (the 256 bytes are among them), then the 9 `SPECIALS`, then padding if any.
Ordinary text never becomes a special id, so nobody can type a role marker. Text that UTF-8 cannot hold
(a lone surrogate such as "\\ud800") is refused with a ValueError, never changed in silence; arbitrary bytes
go through `encode_bytes` and `decode_bytes`, which are exact on everything.

Simplified: all word counts stay in memory and training uses one core. Training splits words with the `regex`
module and encoding with Rust's: where their Unicode tables differ (letters assigned in the last few years)
a rare word may be cut in another place. That costs a token, never the round trip.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import regex
import tiktoken

# The first ends a document; <|end|> ends a turn of a chat; the last four mark reasoning and answer.
SPECIALS = (
    "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<think>", "</think>", "<answer>", "</answer>",
)  # fmt: skip
MARKS = ("<think>", "</think>", "<answer>", "</answer>")

# In order: contractions | a word with its leading space | ONE digit | a run of punctuation | whitespace.
# Digits stand alone, so that 123 is always 1, 2, 3 and a model can learn to carry. Runs of whitespace are cut
# at 256: the engine inside tiktoken backtracks through them and would crash on a million spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s{1,256}(?!\S)|\s"
# GPT-2's own, with the same cut in whitespace. Fixed here so that the hash outlives tiktoken's versions.
R50K_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s{1,256}(?!\S)|\s"
R50K_VOCAB = 50_304  # 50,256 ranks + 9 specials, padded to a multiple of 64 for the matrix units
FILE_VERSION = 1


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: str = PATTERN) -> dict[bytes, int]:
    """Learn `vocab_size` ranks (the 256 bytes and `vocab_size` - 256 merges) from texts: {token bytes: rank}.

    The most frequent pair is merged first; among equals, the pair of the lowest ids. The result depends only
    on the words and their counts, not on the order of the texts.
    Raises ValueError if the texts are too small to yield so many merges.

    Inside, a token is the one character chr(id), so a word is a str with a character a token and a pair a str
    of two: finding and replacing a pair is then `str.find` and `str.replace`, at the speed of C.
    """
    if not 256 <= vocab_size <= sys.maxunicode:
        raise ValueError(f"vocab_size {vocab_size} must be 256 (the single bytes) to {sys.maxunicode}")
    words, repeats = _count_words(texts, pattern)
    counts: dict[str, int] = defaultdict(int)  # how often each pair stands in the texts
    where: dict[str, set[int]] = defaultdict(set)  # the words that hold, or once held, each pair
    for index, word in enumerate(words):
        for left, right in pairwise(word):
            counts[left + right] += repeats[index]
            where[left + right].add(index)

    tokens = [bytes([byte]) for byte in range(256)]
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while len(tokens) < vocab_size:
        pair = _pop_most_frequent(heap, counts)
        if pair is None:
            raise ValueError(
                f"training text is too small, {vocab_size - len(tokens)} tokens short of the vocab_size; "
                f"give more text or lower vocab_size by that number"
            )
        new = chr(len(tokens))
        tokens.append(tokens[ord(pair[0])] + tokens[ord(pair[1])])
        grown: set[str] = set()
        for index in where.pop(pair):
            words[index], lost, born = _merge(words[index], pair, new)
            for other in lost:
                counts[other] -= repeats[index]
            for other in born:
                counts[other] += repeats[index]
                where[other].add(index)
            grown.update(born)
        del counts[pair]
        for other in grown:  # all other counts only fell: their heap entries are put right when popped
            heapq.heappush(heap, (-counts[other], other))
    return {token: rank for rank, token in enumerate(tokens)}


def _count_words(texts: Iterable[str], pattern: str) -> tuple[list[str], list[int]]:
    """Distinct words of two bytes or more, a character a byte, and how often each occurs."""
    if isinstance(texts, str):
        raise ValueError("texts must be an iterable of strings, got one string; wrap it in a list")
    compiled = regex.compile(pattern)
    counter: Counter[str] = Counter()
    for text in texts:
        _utf8(text)
        pieces = compiled.findall(text)
        if sum(map(len, pieces)) != len(text):
            raise ValueError(f"pattern {pattern!r} skips characters of {text[:40]!r}; make it match all")
        counter.update(pieces)
    words = {_utf8(piece).decode("latin-1"): count for piece, count in counter.items()}
    words = {word: count for word, count in words.items() if len(word) > 1}
    return list(words), list(words.values())


def _pop_most_frequent(heap: list[tuple[int, str]], counts: dict[str, int]) -> str | None:
    """Pop until the top entry's count is true. A stale entry (too high) goes back with the true count."""
    while heap:
        negative, pair = heapq.heappop(heap)
        count = counts.get(pair, 0)
        if count == 0:
            continue
        if count == -negative:
            return pair
        heapq.heappush(heap, (-count, pair))
    return None


def _merge(word: str, pair: str, new: str) -> tuple[str, list[str], list[str]]:
    """Replace `pair` by `new`, left to right. Returns the new word, the pairs lost and the pairs born.

    "xaby" with pair "ab" and new "Z" gives "xZy", lost ["xa", "by"] and born ["xZ", "Zy"].
    The merged pair itself is not listed: the caller drops its count.
    """
    lost: list[str] = []
    born: list[str] = []
    at, end = word.find(pair), -1  # where this occurrence starts, where the one before it ended
    while at >= 0:
        if at > 0:
            before = new if at == end else word[at - 1]
            lost.append(before + pair[0])
            born.append(before + new)
        end = at + 2
        if end < len(word):
            lost.append(pair[1] + word[end])
            born.append(new + word[end])
        at = word.find(pair, end)
    return word.replace(pair, new), lost, born


class Tokenizer:
    """A `tiktoken.Encoding` with our special tokens right after its ranks.

    name         "bpe" or "r50k_base"
    encoding     the tiktoken.Encoding underneath
    vocab_size   number of ids a model needs: ranks + 9 specials, padded to 50,304 for r50k_base
    special      {special token: id}
    end_of_text  id of <|endoftext|>, after each document; `pad` is the same id
    end_of_turn  id of <|end|>, after each message of a chat
    hash         sha256 over pattern, ranks and specials: equal hash, equal ids

    Make one with `train`, `from_ranks`, `r50k_base` or `load`. Encoding is safe from several threads.
    """

    def __init__(self, name: str, pattern: str, ranks: dict[bytes, int], vocab_size: int | None = None):
        """`ranks` {token bytes: 0, 1, 2, ...} must hold all 256 bytes. Raises ValueError if it does not."""
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError(f"ranks must be 0..{len(ranks) - 1}, each once; train the tokenizer again")
        missing = sum(bytes([byte]) not in ranks for byte in range(256))
        if missing:
            raise ValueError(f"ranks lack {missing} of the 256 single bytes; train the tokenizer again")
        used = len(ranks) + len(SPECIALS)
        self.name = name
        self.pattern = pattern
        self.ranks = ranks
        self.vocab_size = used if vocab_size is None else vocab_size
        if self.vocab_size < used:
            raise ValueError(f"vocab_size {vocab_size} is below the {used} ids in use; raise it")
        self.special = {token: len(ranks) + index for index, token in enumerate(SPECIALS)}
        self.end_of_text = self.pad = self.special["<|endoftext|>"]
        self.end_of_turn = self.special["<|end|>"]
        self.encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special, explicit_n_vocab=used
        )
        identity = json.dumps([pattern, _ranks_as_text(ranks), list(self.special.items())])
        self.hash = hashlib.sha256(identity.encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, hash={self.hash[:8]})"

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int], pattern: str = PATTERN, name: str = "bpe") -> Tokenizer:
        """The tokenizer of ranks that `train_bpe` returned; its vocab_size is len(ranks) + 9."""
        return cls(name, pattern, ranks)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, pattern: str = PATTERN) -> Tokenizer:
        """Train to exactly `vocab_size` ids: 256 bytes, merges, 9 specials. ValueError as `train_bpe`."""
        smallest = 256 + len(SPECIALS)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size {vocab_size} is below {smallest} (256 bytes + 9 specials); raise it"
            )
        return cls.from_ranks(train_bpe(texts, vocab_size - len(SPECIALS), pattern), pattern)

    @classmethod
    def r50k_base(cls) -> Tokenizer:
        """GPT-2's vocabulary: <|endoftext|> stays 50256, our others are 50257..50264, padded to 50304.

        tiktoken downloads the ranks once, to TIKTOKEN_CACHE_DIR. FileNotFoundError if it cannot.
        """
        try:
            ranks = tiktoken.get_encoding("r50k_base")._mergeable_ranks
        except (OSError, ValueError) as error:
            folder = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
            raise FileNotFoundError(
                f"cannot get the ranks of r50k_base ({type(error).__name__}); connect to the network, or set "
                f"TIKTOKEN_CACHE_DIR (now: {folder}) to a folder where tiktoken has cached them"
            ) from error
        return cls("r50k_base", R50K_PATTERN, ranks, vocab_size=R50K_VOCAB)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what `save` wrote. FileNotFoundError if absent, ValueError if damaged or another version."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; train one and save it there first")
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["version"] != FILE_VERSION:
                raise ValueError(f"version {saved['version']!r}, this code reads {FILE_VERSION}")
            if not isinstance(saved["name"], str) or not isinstance(saved["vocab_size"], int):
                raise ValueError("its name is no text or its vocab_size no number")
            ranks = {base64.b64decode(token): rank for rank, token in enumerate(saved["ranks"])}
            tokenizer = cls(saved["name"], saved["pattern"], ranks, saved["vocab_size"])
            if tokenizer.hash != saved["sha256"]:
                raise ValueError("its content does not match its sha256")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise ValueError(
                f"cannot use the tokenizer file {path} ({reason:.150}); make it again"
            ) from error
        return tokenizer

    def save(self, path: str | Path) -> None:
        """Write one JSON file (ranks in base64), whole or not at all; folders are made as needed."""
        path = Path(path)
        saved = {
            "version": FILE_VERSION,
            "name": self.name,
            "vocab_size": self.vocab_size,
            "sha256": self.hash,
            "pattern": self.pattern,
            "special": self.special,  # for readers: `load` derives it from the ranks
            "ranks": _ranks_as_text(self.ranks),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(saved, indent=0), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, never a special id: "<think>" becomes the ids of its characters."""
        _utf8(text)
        return self.encoding.encode_ordinary(text)

    def encode_with_marks(self, text: str) -> list[int]:
        """As `encode`, but the four think and answer marks become their ids. For text of our own making."""
        _utf8(text)
        return self.encoding.encode(text, allowed_special=set(MARKS), disallowed_special=())

    def encode_batch(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """`encode` of each text, in order, on several threads (default: one a core, 8 at most)."""
        if isinstance(texts, str):
            raise ValueError("texts must be a list of strings, got one string; wrap it in a list")
        for text in texts:
            _utf8(text)
        return self.encoding.encode_ordinary_batch(texts, num_threads=threads or min(8, os.cpu_count() or 1))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes, never a special id: valid UTF-8 as in `encode`, each stray byte as its own id."""
        ids: list[int] = []
        for run in regex.split(r"([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape")):
            if run and "\udc80" <= run[0] <= "\udcff":  # the stray bytes of this run, one character each
                ids += [self.ranks[bytes([byte])] for byte in run.encode("utf-8", "surrogateescape")]
            else:
                ids += self.encode(run)
        return ids

    def decode(self, ids: Iterable[int], keep_ends: bool = False) -> str:
        """Text of ids. Think and answer marks and role markers stay as text; <|endoftext|>, <|end|> (unless
        `keep_ends`) and ids that stand for nothing are dropped. Bytes that are not UTF-8 become U+FFFD."""
        drop = () if keep_ends else (self.end_of_text, self.end_of_turn)
        used = len(self.ranks) + len(SPECIALS)
        known = [index for index in map(int, ids) if 0 <= index < used and index not in drop]
        return self.encoding.decode(known, errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ids, specials included. KeyError on an id that stands for nothing."""
        return self.encoding.decode_bytes([int(index) for index in ids])


def _ranks_as_text(ranks: dict[bytes, int]) -> list[str]:
    """Tokens in order of rank, each in base64."""
    return [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.__getitem__)]


def _utf8(text: str) -> bytes:
    """The text as UTF-8. ValueError on a lone surrogate, which tiktoken would silently turn into U+FFFD, and on what is
    no text."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a str, got {type(text).__name__} {text!r:.40}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate, {text[error.start]!r} at character {error.start}, not UTF-8; "
            f"clean it with text.encode('utf-8', 'replace').decode()"
        ) from error
