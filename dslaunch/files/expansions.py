"""Forms of a shell's words: what is filled into them, and which of its variables come from elsewhere."""

from __future__ import annotations

import re

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PIECE = re.compile(
    r"""\\(?P<escaped>.)                                     # and the kinds of expansion
      | \$'(?P<ansi>(?:[^'\\]|\\.)*)'
      | '(?P<single>[^']*)'
      | (?P<double>")
      | \$\(\((?P<arithmetic>[^()]*(?:\([^()]*\)[^()]*)*)\)\)
      | (?P<command>\$\(|`)
      | \$(?P<name>[A-Za-z_]\w*)
      | \$(?P<place>[\d@*\#])
      | \$\{(?P<braced>[A-Za-z_]\w*|\d)(?:\[[@*]\])?(?:(?P<default>:?-)(?P<otherwise>[^{}]*))?\}
      | (?P<untold>\$\{|\$[\w@*#?!-])
    """,
    re.VERBOSE | re.DOTALL,
)
REFERENCE = re.compile(r"(\"?)\$(?:(\w+|[@*])|\{(\w+|[@*])(\[[@*]\])?\})\1")
DEFAULT_ALONE = re.compile(r"\$\{[A-Za-z_]\w*:?-[^{}]*\}")
BARE_NAME = re.compile(r"\$?\{?\b([A-Za-z_]\w*)\}?")
ONE_BY_DEFAULT = re.compile(r"\"?\$\{\w+:?-[\"']?1[\"']?\}\"?")
BY_DEFAULT = re.compile(r"\$\{\w+:?-|\$\d|\$\{\d")
LENGTH = re.compile(r"\$\{#(\w+)\[[@*]\]\}")
PARTS = re.compile(r"(?:\$\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)|`[^`]*`|\S)+")
"""Words of a text: blanks in a substitution part none."""
BARE_REFERENCE = re.compile(r"\$\{?(\w+)\}?")
OF_PLATFORM = re.compile(r"SLURM_|PET_|OMPI_|(?:MASTER_ADDR|(?:LOCAL_|NODE_|GROUP_|MACHINE_)?RANK)$")
"""Variables that what starts a script sets: a default in it is for other places."""
OF_NODES = re.compile(r"N?NODES|N(?:UM)?_?NODES|NUM_MACHINES|WORLD_SIZE")
"""Numbers that a job's environment gives to a script with a default of 1 for a run by hand."""
PASSES = 4
"""Passes of a loop that are looked at one by one."""
MAX_CHARACTERS = 1_000_000
"""What one script's variables may fill in, in all."""
ONE_WORD = frozenset({"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "WORLD_SIZE"})
"""Variables that hold a word: `MASTER_ADDR="address of the first node"` is a gap to be filled in."""
