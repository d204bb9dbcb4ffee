"""The commands of a shell script, read from its tokens in one go: blocks, variables and functions are followed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dslaunch.files import branches
from dslaunch.files.branches import Choice
from dslaunch.files.flags import Word
from dslaunch.files.functions import Call, Functions
from dslaunch.files.heredoc import PIECE, Heredoc
from dslaunch.files.lexer import Token, tokens
from dslaunch.files.looped import Loops
from dslaunch.files.position import Lines, Position
from dslaunch.files.shell import Assignment
from dslaunch.files.switches import REMOTE
from dslaunch.files.variables import Variables

_OPENS = {"if", "for", "while", "until", "case", "{", "select"}
_CLOSES = {"fi", "done", "esac", "}"}
_TURNS = {"elif", "else"}
_PASSED = {"then", "do", "!", "time", "in"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_OWN = {"local", "declare", "typeset"}
_TESTS = {"[", "[[", "test"}
_OR = {"&&", "||"}
_AS_NUMBER = re.compile(r"-\w*i\w*")
_SPLITS_AGAIN = {"eval"}
_WITH_BRACKETS = {"case", "for", "function", "select"}
_SHELLS = re.compile(r"(?:.*/)?(?:ba|z|da)?sh")
_COMMAND_OPTION = re.compile(r"-\w*c")
_ALL_ARGUMENTS = frozenset({"$@", "$*", "${@}", "${*}"})
_REDIRECTION = re.compile(r"\d*[<>&].*")
_NAME_VALUE = re.compile(r"[A-Za-z_]\w*\+?=")
_FEWER_NODES = re.compile(r"-[Nnr]\d*(?![\w-])|--n(?:odes|tasks)\b")
"""Options of srun with which a step is smaller than its job."""


@dataclass(frozen=True)
class Command:
    """A simple command, with the variables filled in that its script sets."""

    words: tuple[Word, ...]
    """The first is the program."""
    at: Position
    environment: tuple[Assignment, ...]
    """NAME=value in front of it."""
    heredoc: Heredoc | None
    conditional: bool
    """It stands in an if, a loop, a case or a function."""
    background: bool = False
    """`&` ends it."""


class Reader:
    """Goes through the tokens once, following blocks and variables."""

    def __init__(self, text: str, environment: Mapping[str, str], chosen: Choice | None) -> None:
        self.text = text
        self.lines = Lines(text)
        self.variables = Variables(text, environment, chosen)
        self.functions = Functions()
        self.loops = Loops(text, self.variables)
        self.commands: list[Command] = []
        self.declared: list[tuple[Word, ...]] = []
        self._words: list[Token] = []
        self._in_test = False
        """Between `[[` and `]]`."""
        self._in_pattern = False
        """Between `in` or `;;` of a case and its `)`."""
        self._subjects: list[Word | None] = []
        """What each open case compares with its patterns."""
        self._patterns: list[Token] = []
        self._asked = (0, 0)
        """Where the condition of an `if` or `elif` begins, and how many commands came before it."""
        self._tested = False
        """The command before this one is a test."""
        self._before = "\n"
        """The operator or newline that ended the command before this one."""

    def read(self, start: int = 0, end: int | None = None) -> None:
        """Every command from one offset up to another, or to the end."""
        redirected = False
        behind = 0
        for token in tokens(self.text, start, end):
            raw = self.text[token.start : token.end]
            if token.start < behind:
                continue
            if token.kind == "heredoc":
                self._attach(token)
            elif token.kind == "word":
                if not redirected:
                    self._word(token, raw)
                redirected = False
            elif token.kind == "operator" and _REDIRECTION.fullmatch(raw) and raw not in ("&", "&&"):
                redirected = True
            else:
                if raw == "(" and self._is_stray(token):
                    self.variables.stray.append(token.start)
                behind = self._counted(raw)
                self._end(raw)
        self._end("\n")

    def _counted(self, raw: str) -> int:
        """The offset behind the head of `for ((...))`, whose first bracket this is; else 0."""
        alone = raw == "(" and len(self._words) == 1
        return (self.loops.counts(self._words[0].start) or 0) if alone else 0

    def _is_stray(self, bracket: Token) -> bool:
        """Whether `(` stands among a command's words, where bash expects none."""
        words = self._words
        head = self.text[words[0].start : words[0].end] if words else ""
        glob = self.text[bracket.start - 1] in "?*+@!$"
        line = self.text.rfind("\n", 0, bracket.start) + 1
        gap = "<" in self.text[line : bracket.start]  # NAME=<some words (such)>
        return len(words) > 1 and not (self._in_test or self._in_pattern or glob or gap or head in _WITH_BRACKETS)

    def _word(self, token: Token, raw: str) -> None:
        """Words of blocks are taken up where a command may begin; the rest is the command's."""
        first = not self._words
        self._in_test = raw == "[[" or (self._in_test and raw != "]]")
        if raw == "{" and self._names_function():
            first, self._words = True, []
        if raw == "}" and self._words and self.text.startswith("]]", self._words[-1].start):
            self._end(";")  # `[[ ... ]] }`
            first = True
        if first and raw in _OPENS:
            self._opens(token, raw)
        elif first and raw in _CLOSES and self.variables.in_block:
            if name := self.functions.closes(token.end, len(self.commands)):
                self.functions.sets[name] = self.variables.undo()
            else:
                self.variables.leave(empty=raw == "esac" and self._in_pattern)
            self.loops.closes(token.end)
            if raw == "esac" and self._subjects:
                self._subjects.pop()
            self._in_pattern = False
        elif first and raw in _TURNS and self.variables.in_block:
            self.variables.turn()
            self._asked = (token.end, len(self.commands))
            if raw == "else":
                self.variables.decide(True, "", last=True)
        elif not (first and raw in _PASSED):
            self._words.append(token)
            if raw == "in" and len(self._words) == 3 and self.text.startswith("case", self._words[0].start):
                self._end("\n")
        elif raw == "do":
            self.loops.begins(token.end)
        elif raw == "then" and self.variables.in_block:
            self._decides(token.start)

    def _names_function(self) -> bool:
        """Whether `function NAME` stands before this brace."""
        words = [self.text[each.start : each.end] for each in self._words[:3]]
        named = len(words) == 2 and words[0] == "function"
        if named:
            self.functions.named(words[1])
        return named

    def _opens(self, token: Token, raw: str) -> None:
        self.variables.enter(raw, token.start)
        self.loops.opens(raw, token.start)
        self._asked = (token.end, len(self.commands))
        if raw == "{":
            self.functions.opens(token.end, self.loops.end(token.start), len(self.commands))
        if raw == "case":
            self._subjects.append(None)
        if raw in ("for", "select", "case"):
            self._words.append(token)

    def _decides(self, end: int) -> None:
        """The condition of an `if` or `elif` ends here."""
        start, before = self._asked
        asked = self.text[start:end].strip().rstrip(";").strip()
        tested = self.commands[before:]
        one = len(tested) == 1 and asked.startswith("[") and asked.endswith("]")
        self.variables.decide(branches.holds(tested[0].words) if one else None, asked)

    def _matches(self) -> None:
        """A pattern of a case was read, up to its bracket."""
        patterns, self._patterns = self.variables.expand(self._patterns), []
        subject = self._subjects[-1] if self._subjects else None
        every = any(each.text == "*" for each in patterns)
        same = branches.matches(subject, patterns) if subject is not None else True if every else None
        self.variables.decide(same, subject.text if subject else "", last=every)

    def _end(self, raw: str) -> None:
        """A command ends at this operator or newline."""
        words, self._words = self._words, []
        head = self.text[words[0].start : words[0].end] if words else ""
        before, self._before = self._before, raw
        tested, self._tested = self._tested, head in _TESTS or (self._tested and before in _OR)
        if head == "case":
            self._in_pattern = True
            self._subjects[-1:] = self.variables.expand(words[1:2])[:1] or self._subjects[-1:]
        elif head in ("for", "select"):
            if len(words) > 1:
                name = self.text[words[1].start : words[1].end]
                self.loops.over(name, words[3:]) if head == "for" else self.variables.forget(name)
        elif self._in_pattern:
            self._patterns += words
            if raw == ")":
                self._in_pattern = False
                self._matches()
        elif raw == "(" and (len(words) == 1 or (head == "function" and len(words) == 2)):
            self.functions.named(self.text[words[-1].start : words[-1].end])  # its braces follow
        elif words:
            self._command(words, background=raw == "&", apart=before in _OR, tested=tested)
        if raw in (";;", ";&", ";;&") and self._subjects:
            self.variables.turn()
            self._in_pattern = True

    def _command(self, words: Sequence[Token], *, background: bool, apart: bool, tested: bool) -> None:
        """An assignment changes variables; anything else is kept.

        Args:
            apart: what stands before it decides whether it is run.
            tested: that is a test such as `[ -d DIR ]`.
        """
        names = [self._is_assignment(token) for token in words]
        head = self.text[words[0].start : words[0].end]
        if all(names) or head in _DECLARES:
            if self.functions.call and head in _OWN:
                self._keeps(self.functions.call, words[1:])
            perhaps = apart and tested and bool(self.commands) and not self._gives_default(words)
            if perhaps:
                self.variables.enter("if", words[0].start)
            for token in words:
                self.variables.assign(token)
            if perhaps:
                self.variables.leave()
            raws = [self.text[token.start : token.end] for token in words[1:]]
            if head in _DECLARES and any(_AS_NUMBER.fullmatch(raw) for raw in raws):
                for raw in raws:
                    self.variables.forget(raw.partition("=")[0])  # bash calculates what is set from here on
            if head in _DECLARES:
                self.declared.append(tuple(self._typed(token) for token in words[1:]))
            return
        if head == "read":
            for token in words[1:]:
                self.variables.forget(self.text[token.start : token.end])
        call = self.functions.call
        if head == "return" and call is not None:
            call.may_return = call.may_return or apart or self.variables.depth > call.depth
        elif head in ("exit", "return") or (head == "exec" and len(words) > 1):
            self.variables.exits(apart=apart)
        front = names.index(False)
        environment = tuple(self._environment(token) for token in words[:front])
        if self._follows(words[front:], environment, background=background):
            return
        expanded = tuple(self._expanded(words[front:]))
        if not expanded:
            return
        if head in ("break", "continue"):
            self.variables.skips()
        if head == "shift":
            self._shifts(expanded)
        at = self.lines.position(words[front].start)
        within = self.variables.in_block or any(each.may_return for each in self.functions.calls)
        later = background or (call is not None and call.background)
        self.commands.append(Command(expanded, at, environment, None, within, later))

    def _follows(
        self, words: Sequence[Token], environment: tuple[Assignment, ...], *, background: bool
    ) -> bool:
        """Whether they call a function of the script; what its body runs is read with what they hand to it."""
        name = self.text[words[0].start : words[0].end]
        function = self.functions.take(name)
        if function is None:
            for each in self.functions.sets.get(name, ()):
                self.variables.forget(each)
            return False
        handed, outer = self.variables.expand(words[1:]), self.variables.arguments
        call, first, passes = self.functions.call, len(self.commands), len(self.loops.passes)
        own = Call(name, self.variables.depth, background or (call is not None and call.background))
        self.functions.calls.append(own)
        self.variables.gets(handed)
        kept = self._asked, self._before
        self.read(function.start, function.end)
        self._asked, self._before = kept
        self.variables.gets(outer)
        self.variables.values |= {name: value for name, value in own.before.items() if value is not None}
        for each in own.before:
            if own.before[each] is None:
                self.variables.values.pop(each, None)
        self.functions.calls.pop()
        self.functions.called.add(name)
        del self.loops.passes[passes:]  # the definition's own hold there
        self.commands[first:] = [
            replace(each, environment=(*environment, *each.environment)) for each in self.commands[first:]
        ]
        return True

    def _gives_default(self, words: Sequence[Token]) -> bool:
        """Whether the test asks for the variable that they set: `[ -z "$NAME" ] && NAME=1`."""
        asked = " ".join(word.text for word in self.commands[-1].words)
        names = (self.text[each.start : each.end].partition("=")[0].rstrip("+") for each in words)
        return any(re.search(rf"-[vz]\s+\S*\b{re.escape(name)}\b", asked) for name in names)

    def _keeps(self, call: Call, words: Sequence[Token]) -> None:
        """`local NAME=value`: it is what it was again behind the call."""
        for token in words:
            name = self.text[token.start : token.end].partition("=")[0].rstrip("+")
            call.before.setdefault(name, self.variables.values.get(name))

    def _shifts(self, words: Sequence[Word]) -> None:
        """The first arguments are dropped; in a block of the function nothing is told of them from here on."""
        call, held = self.functions.call, self.variables.arguments
        count = words[1].text if len(words) > 1 else "1"
        told = call is not None and call.depth == self.variables.depth and count.isdecimal() and held is not None
        self.variables.gets(held[int(count) :] if told and held is not None else None)

    def _typed(self, token: Token) -> Word:
        return Word(self.text[token.start : token.end], self.lines.position(token.start))

    def _expanded(self, words: Sequence[Token]) -> Iterator[Word]:
        """The words; what eval or `bash -c` reads once more is parted at its blanks."""
        resplit, before = False, ""
        said = len(self.variables.first_words)
        self.variables.of_step = any(_FEWER_NODES.match(self.text, each.start) for each in words)
        for token in words:
            raw = self.text[token.start : token.end]
            resplit = resplit or before in _SPLITS_AGAIN
            inner = raw[:1] in "\"'" and _COMMAND_OPTION.fullmatch(before) and self._shell_runs(words, token)
            head = self.text[words[0].start : words[0].end]
            remote = raw[:1] in "\"'" and head in REMOTE and token == words[-1]
            found = self.variables.expand([token], resplit=resplit or bool(inner) or remote)
            if inner and not resplit:
                yield from self._with_rest(found, words[words.index(token) + 1 :])
                return
            if not (raw.startswith("$") and not before.startswith("-") and [each.text for each in found] == [""]):
                yield from found  # and nothing of an empty variable
            before = raw
        if self.text[words[0].start : words[0].end] in _TESTS:
            del self.variables.first_words[said:]  # `[ -z "$ARRAY" ]` asks whether it is empty

    def _with_rest(self, inside: Sequence[Word], behind: Sequence[Token]) -> Iterator[Word]:
        """The words that a shell inside reads; what follows its text are its $0, and from $1 on its "$@"."""
        rest = self.variables.expand(behind[1:])
        for word in inside:
            yield from rest if word.text.strip('"') in _ALL_ARGUMENTS and behind else (word,)

    def _shell_runs(self, words: Sequence[Token], at: Token) -> bool:
        """Whether `bash` or the like stands two words before `at`."""
        index = words.index(at)
        return index > 1 and _SHELLS.fullmatch(self.text, words[index - 2].start, words[index - 2].end) is not None

    def _is_assignment(self, token: Token) -> bool:
        return _NAME_VALUE.match(self.text, token.start, token.end) is not None

    def _environment(self, token: Token) -> Assignment:
        name, _, _ = self.text[token.start : token.end].partition("=")
        start = token.start + len(name) + 1
        word = self.variables.whole(Token("word", start, token.end))
        return Assignment(name, word.text, self.lines.position(token.start), word.known)

    def _attach(self, token: Token) -> None:
        """A heredoc belongs to the last command."""
        if self.commands:
            body = self.text[token.start : token.end]
            names = {found["name"] or found["braced"] for found in PIECE.finditer(body)}
            values = {name: told for name in names if name and (told := self.variables.possible(name))}
            heredoc = Heredoc(body, self.lines.position(token.start), token.expands, values)
            self.commands[-1] = replace(self.commands[-1], heredoc=heredoc)
