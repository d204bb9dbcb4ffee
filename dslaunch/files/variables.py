"""Variables that a shell script sets itself, filled into its words; each word keeps the place where it is written.

What the environment or a command decides is not guessed: such a word stays as it is and is not `known`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dslaunch.files import loops
from dslaunch.files.arithmetic import whole_number
from dslaunch.files.flags import Word, is_told
from dslaunch.files.lexer import Token, UnclosedError, fields, tokens
from dslaunch.files.position import Lines, Position

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PIECE = re.compile(
    r"""\\(?P<escaped>.)                                     # and the kinds of expansion
      | \$'(?P<ansi>(?:[^'\\]|\\.)*)'
      | '(?P<single>[^']*)'
      | (?P<double>")
      | \$\(\((?P<arithmetic>[^()]*(?:\([^()]*\)[^()]*)*)\)\)
      | (?P<command>\$\(|`)
      | \$(?P<name>[A-Za-z_]\w*)
      | \$\{(?P<braced>[A-Za-z_]\w*)(?:\[[@*]\])?(?:(?P<default>:?-)(?P<otherwise>[^{}]*))?\}
      | (?P<untold>\$\{|\$[\w@*#?!-])
    """,
    re.VERBOSE | re.DOTALL,
)
_REFERENCE = re.compile(r"(\"?)\$(?:(\w+)|\{(\w+)(\[[@*]\])?\})\1")
_DEFAULT_ALONE = re.compile(r"\$\{[A-Za-z_]\w*:?-[^{}]*\}")
_BARE_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\}?")
_LENGTH = re.compile(r"\$\{#(\w+)\[[@*]\]\}")
_PARTS = re.compile(r"(?:\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\S)+")
"""Words of a text: blanks in a substitution part none."""
_BARE_REFERENCE = re.compile(r"\$\{?(\w+)\}?")
_OF_PLATFORM = re.compile(r"SLURM_|PET_|OMPI_|(?:MASTER_ADDR|(?:LOCAL_|NODE_|GROUP_|MACHINE_)?RANK)$")
"""Variables that what starts a script sets: a default in it is for other places."""
_OF_NODES = re.compile(r"N?NODES|N(?:UM)?_?NODES|NUM_MACHINES|WORLD_SIZE")
"""Numbers that a job's environment gives to a script with a default of 1 for a run by hand."""
_MAX_CHARACTERS = 1_000_000
"""What one script's variables may fill in, in all."""


_ONE_WORD = frozenset({"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "WORLD_SIZE"})
"""Variables that hold a word: `MASTER_ADDR="address of the first node"` is a gap to be filled in."""


@dataclass(frozen=True)
class Value:
    """What a variable holds, as the words it makes without quotes."""

    words: tuple[Word, ...]
    array: bool = False

    @property
    def text(self) -> str:
        """As it stands in quotes."""
        return " ".join(word.text for word in self.words)

    @property
    def known(self) -> bool:
        """Whether all of it is told."""
        return all(word.known for word in self.words)


class Variables:
    """The variables of one script, at one place of it."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.text = text
        self._environment = {
            name: Value((Word(value, Position(1, 1)),)) for name, value in environment.items()
        }
        """What is set before the script begins."""
        self._looped: dict[str, tuple[str, ...]] = {}
        self.of_step = False
        """The command is a step of its own size: what its tasks fill in isn't the script's environment."""
        self._late = self._met_late = False
        self.lines = Lines(text)
        self.values: dict[str, Value] = {}
        self._blocks: list[dict[str, Value | None]] = []
        """Of each open block, what its variables were before it."""
        self._left = _MAX_CHARACTERS
        self.stray: list[int] = []
        """Where characters stand that bash takes for operators, in arrays and among words."""
        self.first_words: list[tuple[str, Position]] = []
        """Arrays of several words that stand as a word without `[@]`."""

    @property
    def in_block(self) -> bool:
        """Inside an if, a loop, a case or a function."""
        return bool(self._blocks)

    def enter(self) -> None:
        """A block begins: what it sets may not be set."""
        self._blocks.append({})

    def leave(self) -> None:
        """It ends: what it set is not told from here on."""
        for name, before in self._blocks.pop().items():
            self._remember(name)
            self._looped.pop(name, None)
            self.values[name] = self._undecided(name, before)

    def _undecided(self, name: str, before: Value | None) -> Value:
        """What stood before a block that added words stays, and there may be more."""
        now = self.values[name]
        kept = before.words if before and now.words[: len(before.words)] == before.words else ()
        if before is not None and now.words == before.words:
            return before
        marker = Word(f"${name}", now.words[-1].at if now.words else self.lines.position(0), known=False)
        return Value((*kept, marker), now.array)

    def assign(self, token: Token) -> bool:
        """Takes up `NAME=value`, `NAME+=value` or `NAME=(...)`; False where the word is none."""
        match = _ASSIGNMENT.match(self.text, token.start, token.end)
        if match is None:
            return False
        name, start = match[1], match.end()
        self._remember(name)
        if self.text.startswith("(", start):
            inside = [each for each in tokens(self.text, start + 1, token.end - 1) if each.kind != "newline"]
            self.stray += [each.start for each in inside if each.kind == "operator"]
            words = self.expand(each for each in inside if each.kind == "word")
            value = Value(tuple(words), array=True)
        else:
            value = Value(tuple(self._split(Token("word", start, token.end))))
            if name in _ONE_WORD and len(value.words) > 1:
                value = self._untold(name)
        if not value.known and loops.is_step(self.text, token.start, token.end):
            self.forget(name)
            return True
        if match[2]:
            earlier = self.values.get(name, Value(()))
            value = Value(earlier.words + value.words, earlier.array)
        self.values[name] = value
        return True

    def _untold(self, name: str) -> Value:
        return Value((Word(f"${name}", self.lines.position(0), known=False),))

    def _value(self, name: str) -> Value | None:
        late = self.of_step and self._late
        return self.values.get(name) or (None if late else self._environment.get(name))

    def forget(self, name: str, values: tuple[str, ...] = ()) -> None:
        """The shell sets this variable to what isn't told: `for NAME in`, `read NAME`.

        Args:
            values: all that a loop gives it, one after the other.
        """
        self._remember(name)
        self.values[name] = self._untold(name)
        self._looped[name] = values

    def possible(self, name: str) -> tuple[str, ...]:
        """What it may hold here: one value, or those that a loop gives it; none where that isn't told."""
        value = self._value(name)
        if value is not None and value.known:
            return (value.text,)
        return self._looped.get(name, ()) if value is not None and value.text == f"${name}" else ()

    def computed(self, expression: str) -> str:
        """An expression of whole numbers with what is told filled in, or its value; `$` may stand or not."""

        def length(found: re.Match[str]) -> str:
            value = self.values.get(found[1])
            return str(len(value.words)) if value and value.known and value.array else found[0]

        def known(found: re.Match[str]) -> str:
            value = self._value(found[1])
            return value.text if value and value.known and len(value.text) < 20 else found[0]

        inner = expression.removeprefix("$((").removesuffix("))") if expression.startswith("$((") else expression
        text = _BARE_NAME.sub(known, _LENGTH.sub(length, inner))
        number = whole_number(text)
        return text if number is None else str(number)

    def _remember(self, name: str) -> None:
        if self._blocks:
            self._blocks[-1].setdefault(name, self.values.get(name))

    def expand(self, words: Iterable[Token], *, resplit: bool = False) -> list[Word]:
        """The words of a command.

        Args:
            resplit: the words are read again by a shell (eval, bash -c), which parts them once more.
        """
        return [word for token in words for word in (self._split(token) if resplit else self._word(token))]

    def _word(self, token: Token) -> list[Word]:
        """One word as typed; a variable alone, without quotes or an array's, becomes the words of its value."""
        match = _REFERENCE.fullmatch(self.text, token.start, token.end)
        name = (match[2] or match[3]) if match else ""
        value = self._value(name)
        if match and value and value.array and not match[4] and len(value.words) > 1:
            self.first_words.append((name, self.lines.position(token.start)))
        if match and value and (not match[1] or (value.array and match[4] == "[@]")):
            if value == self._untold(name):
                return [Word(f"${name}", self.lines.position(token.start), known=False)]
            return self._paid(value.words, token)
        filled = self._filled(token)
        if filled.known and _DEFAULT_ALONE.fullmatch(self.text, token.start, token.end):
            return [Word(part, filled.at) for part in filled.text.split()]
        return [filled]

    def _split(self, token: Token) -> list[Word]:
        """A word without its outer quotes, parted at its blanks."""
        start, end = token.start, token.end
        quote = self.text[start:end][:1]
        if end - start < 2 or quote not in "\"'":
            return self._word(token)
        if self.text.find(quote, start + 1) != end - 1:
            return self._glued(token)
        self._late = late = quote == "'"
        found: list[Word] = []
        try:
            parts = [*fields(self.text, start + 1, end - 1)]
        except UnclosedError:  # a quote in it is a letter: "don't"
            self._late = False
            return self._glued(token)
        for part in parts:
            for word in self._word(part) if not late else [self._filled(part)]:
                own = self._escaped(word) if not late and self._escapes(part) else word
                found.append(replace(own, late=late or own.late))
        self._late = False
        return found

    def _glued(self, token: Token) -> list[Word]:
        """A word of several quoted pieces, of which a shell inside may fill in some: '... $RANK'" $OUT"."""
        filled = self._filled(token)
        late = filled.late or self.text[token.start] == "'" or self._escapes(token)
        joined = filled.text.replace("\\\n", " ")  # the shell inside takes the lines for one
        return [Word(part, filled.at, is_told(part), late) for part in _PARTS.findall(joined)]

    def _escaped(self, word: Word) -> Word:
        """A word with `\\$NAME` in it, which the shell inside fills in."""
        environment = {} if self.of_step else self._environment
        text = _BARE_REFERENCE.sub(
            lambda found: environment[found[1]].text if found[1] in environment else found[0], word.text
        )
        return replace(word, text=text, late=True)

    def _escapes(self, part: Token) -> bool:
        """Whether it holds `\\$`, which the shell inside reads as the `$` of a variable."""
        return "\\$" in self.text[part.start : part.end]

    def _paid(self, words: tuple[Word, ...], token: Token) -> list[Word]:
        """The words of a value, unless the script fills in more than any real one does."""
        self._left -= sum(len(word.text) + 1 for word in words)
        if self._left >= 0:
            return list(words)
        return [Word(self.text[token.start : token.end], self.lines.position(token.start), known=False)]

    def _filled(self, token: Token) -> Word:
        """One word, with its quotes removed and its variables filled in."""
        self._met_late = False
        text, known = self._text(token.start, token.end)
        return Word(text, self.lines.position(token.start), known, self._met_late)

    def _text(self, start: int, end: int) -> tuple[str, bool]:
        parts: list[str] = []
        known, at, quoted = True, start, False
        while at < end:
            match = _PIECE.search(self.text, at, end)
            parts.append(self.text[at : match.start() if match else end])
            if match is None:
                break
            at = match.end()
            if match["double"]:
                quoted = not quoted
            elif quoted and match["single"] is not None:
                parts.append("'")
                at = match.start() + 1
            elif match["command"]:
                parts.append(self.text[match.start() : end])
                return "".join(parts).rstrip('"'), False
            else:
                text, told = self._piece(match)
                parts.append(text)
                known = known and told
        return "".join(parts), known

    def _piece(self, match: re.Match[str]) -> tuple[str, bool]:
        """An escape, a quoted text or an expansion: what it becomes, and whether that is told."""
        for group in ("single", "ansi"):
            if match[group] is not None:
                return match[group], True
        if match["escaped"]:
            return ("", True) if match["escaped"] == "\n" else (match["escaped"], True)
        if match["arithmetic"]:
            return self._computed(match)
        name = match["name"] or match["braced"]
        value = self._value(name)
        if value is not None:
            self._met_late = self._met_late or any(word.late for word in value.words)
            self._left -= len(value.text)
            return (value.text, value.known) if self._left >= 0 else (match[0], False)
        counts_nodes = match["otherwise"] == "1" and _OF_NODES.fullmatch(name)
        if match["default"] and not _OF_PLATFORM.match(name) and not counts_nodes:
            return match["otherwise"].strip("\"'"), "$" not in match["otherwise"]
        return match[0], False

    def _computed(self, match: re.Match[str]) -> tuple[str, bool]:
        text = self.computed(match["arithmetic"])
        told = text.removeprefix("-").isdecimal()
        return (text, True) if told else (match[0], False)
