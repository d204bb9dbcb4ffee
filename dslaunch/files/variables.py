"""Variables that a shell script sets itself, filled into its words; each word keeps the place where it is written.

What the environment or a command decides is not guessed: such a word stays as it is and is not `known`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dslaunch.files import loops
from dslaunch.files.arithmetic import whole_number
from dslaunch.files.branches import Choice, Value
from dslaunch.files.expansions import (
    ASSIGNMENT,
    BARE_NAME,
    BARE_REFERENCE,
    BY_DEFAULT,
    DEFAULT_ALONE,
    LENGTH,
    MAX_CHARACTERS,
    OF_NODES,
    OF_PLATFORM,
    ONE_BY_DEFAULT,
    ONE_WORD,
    PARTS,
    PIECE,
    REFERENCE,
)
from dslaunch.files.flags import Word, is_told
from dslaunch.files.lexer import Token, UnclosedError, fields, tokens
from dslaunch.files.position import Position
from dslaunch.files.scopes import Scopes


class Variables(Scopes):
    """The variables of one script, at one place of it."""

    def __init__(self, text: str, environment: Mapping[str, str], chosen: Choice | None = None) -> None:
        super().__init__(text, chosen)
        self._environment = {
            name: Value((Word(value, Position(1, 1)),)) for name, value in environment.items()
        }
        """What is set before the script begins."""
        self.of_step = False
        """The command is a step of its own size: what its tasks fill in isn't the script's environment."""
        self._late = self._met_late = False
        self._places: int | None = None
        """How many arguments the function was called with whose body is read."""
        self._left = MAX_CHARACTERS
        self.stray: list[int] = []
        """Where characters stand that bash takes for operators, in arrays and among words."""
        self.first_words: list[tuple[str, Position]] = []
        """Arrays of several words that stand as a word without `[@]`."""

    def assign(self, token: Token) -> bool:
        """Takes up `NAME=value`, `NAME+=value` or `NAME=(...)`; False where the word is none."""
        match = ASSIGNMENT.match(self.text, token.start, token.end)
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
            if BY_DEFAULT.search(self.text, start, token.end):
                self._by_default.add(name)
            if OF_NODES.fullmatch(name) and ONE_BY_DEFAULT.fullmatch(self.text, start, token.end):
                value = self._untold(name)  # NNODES=${PET_NNODES:-1}
            if name in ONE_WORD and len(value.words) > 1:
                value = self._untold(name)
        if not value.known and loops.is_step(self.text, token.start, token.end):
            self.forget(name)
            return True
        if match[2]:
            earlier = self.values.get(name, Value(()))
            value = Value(earlier.words + value.words, earlier.array)
        self.values[name] = value
        if self._picked.values and self.depth == self._picked.depth:
            asked = {each[1] for each in BARE_NAME.finditer(self.text, start, token.end)}
            if asked & self._picked.values.keys():
                self._picked.values[name] = (value, self._untold(name))
        return True

    def _value(self, name: str) -> Value | None:
        late = self.of_step and self._late
        return self.values.get(name) or (None if late else self._environment.get(name))

    def gets(self, words: Sequence[Word] | None) -> None:
        """The arguments `$1`, `$2` ... of a function are these from here on; None: they aren't told."""
        for name in (*map(str, range(1, (self._places or 0) + 1)), "#", "@", "*"):
            self.values.pop(name, None)
        self._places = None if words is None else len(words)
        if words is not None:
            self.values |= {str(place): Value((word,)) for place, word in enumerate(words, 1)}
            at = words[0].at if words else self.lines.position(0)
            self.values["#"] = Value((Word(str(len(words)), at),))
            self.values["@"] = self.values["*"] = Value(tuple(words), array=True)

    @property
    def arguments(self) -> tuple[Word, ...] | None:
        """What `gets` set."""
        return None if self._places is None else self.values["@"].words

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
        text = BARE_NAME.sub(known, LENGTH.sub(length, inner))
        number = whole_number(text)
        return text if number is None else str(number)

    def expand(self, words: Iterable[Token], *, resplit: bool = False) -> list[Word]:
        """The words of a command.

        Args:
            resplit: the words are read again by a shell (eval, bash -c), which parts them once more.
        """
        return [word for token in words for word in (self._split(token) if resplit else self._word(token))]

    def whole(self, token: Token) -> Word:
        """The value behind NAME= in front of a command: one word, which no blank of a variable's parts."""
        return self._filled(token)

    def _word(self, token: Token) -> list[Word]:
        """One word as typed; a variable alone, without quotes or an array's, becomes the words of its value."""
        match = REFERENCE.fullmatch(self.text, token.start, token.end)
        name = (match[2] or match[3]) if match else ""
        value = self._value(name)
        if match and value and value.array and not match[4] and len(value.words) > 1 and name.isidentifier():
            self.first_words.append((name, self.lines.position(token.start)))
        if match and value and (not match[1] or name == "@" or (value.array and match[4] == "[@]")):
            if value == self._untold(name):
                return [Word(f"${name}", self.lines.position(token.start), known=False)]
            return self._paid(value.words, token)
        filled = self._filled(token)
        if filled.known and DEFAULT_ALONE.fullmatch(self.text, token.start, token.end):
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
        return [Word(part, filled.at, is_told(part), late) for part in PARTS.findall(joined)]

    def _escaped(self, word: Word) -> Word:
        """A word with `\\$NAME` in it, which the shell inside fills in."""
        environment = {} if self.of_step else self._environment
        text = BARE_REFERENCE.sub(
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
            match = PIECE.search(self.text, at, end)
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
        name = match["name"] or match["braced"] or match["place"] or ""
        if not name.isidentifier() and (self._places is None or self._late):
            return match[0], False  # of the script, or of a shell inside
        value = self._value(name)
        if value is not None:
            self._met_late = self._met_late or any(word.late for word in value.words)
            self._left -= len(value.text)
            return (value.text, value.known) if self._left >= 0 else (match[0], False)
        if name.isdecimal() and match["default"] is None:
            return "", True
        counts_nodes = (match["otherwise"] or "").strip("\"'") == "1" and OF_NODES.fullmatch(name)
        if match["default"] and not OF_PLATFORM.match(name) and not counts_nodes:
            return match["otherwise"].strip("\"'"), "$" not in match["otherwise"]
        return match[0], False

    def _computed(self, match: re.Match[str]) -> tuple[str, bool]:
        text = self.computed(match["arithmetic"])
        told = text.removeprefix("-").isdecimal()
        return (text, True) if told else (match[0], False)
