"""Changes of emitted text, one place at a time: what a slip of an engineer's hand would be."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

How = str | Callable[[re.Match[str]], str]


def _number(before: str, change: Callable[[int], int], after: str = "") -> Callable[[re.Match[str]], str]:
    return lambda match: f"{before}{change(int(match[1]))}{after}"


# (kind, what, how it changes). A rule applies at every place that it matches.
RULES: tuple[tuple[str, str, How], ...] = (
    ("barrier", r"\bsync\(\);", ";"),
    ("barrier", r"\bsync_tiles\(\);", ";"),
    ("barrier", r"\brelease\(ring_\w+\);", ";"),
    ("barrier", r"__builtin_amdgcn_s_barrier\(\);", ";"),
    ("wait", r"__builtin_amdgcn_fence\(.*?\);", ";"),
    ("operands", r"\bmultiply\((t|b|own)\b(.*?), (x|a|keys)\b(.*?), (\S+)\)", r"multiply(\3\4, \1\2, \5)"),
    ("operands", r"__builtin_amdgcn_mfma_(\w+)\((.*?a\)), (.*?b\)), d", r"__builtin_amdgcn_mfma_\1(\3, \2, d"),
    ("operands", r"\bpack\((\w+[\[\w\]]*), (\w+[\[\w\]]*)\)", r"pack(\2, \1)"),
    ("operands", r"__builtin_shufflevector\((\w)0, (\w)1,", r"__builtin_shufflevector(\g<1>1, \g<2>0,"),
    ("operands", r"\bproduct(_rounded)?\((\w+), (\S+), (\w+)", r"accumulate(\2, \3, \4"),
    ("operands", r"transposed\((ring_\w+\.\w+\(\))\)", r"\1"),
    ("mask", r"(?<=\w|\)|\]) < (?=\w)", " <= "),
    ("mask", r"(?<=\w|\)|\]) < (?=\w)", " >= "),
    ("mask", r" <= ", " > "),
    ("mask", r" >= ", " < "),
    ("mask", r" == ", " != "),
    ("lane", r"\b(low_lane|upper|wave|thread_id)\(\)", r"(\1() / 2)"),
    ("lane", r"\bteam\(\)", "(team() + 1)"),
    ("lane", r"\blane\b(?= [%/^])", "(lane / 2)"),
    ("index", r" \+ (?=[\w(])", " + 1 + "),
    ("index", r" / (\d+)\b", _number(" / ", lambda n: 2 * n)),
    ("index", r" % (\d+)\b", _number(" % ", lambda n: 2 * n)),
    ("index", r"\b(\d+) \* ", _number("", lambda n: n + 1, " * ")),
    ("index", r"(?<=\w|\)) \* (\w+)_stride_", r" * 2 * \1_stride_"),
    ("index", r"\[i\]", "[i + 1]"),
    ("index", r"PITCH\b(?= \+|\])", "COLUMNS"),
)


@dataclass(frozen=True)
class Mutant:
    """A change at one place: the line's number, from 1, what stands there before and after, and on the line above."""

    kind: str
    line: int
    before: str
    after: str
    above: str

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.kind}, below `{self.above.strip()}`: {self.before.strip()}  ->  {self.after.strip()}"


def mutants(text: str) -> Iterator[Mutant]:
    """Every change at every place, in the order of the text."""
    lines = text.split("\n")
    code = lines.index("constexpr int K = 128, V = 128;  // head dims") if "V = 128" in text else 0
    for number, line in enumerate(lines, 1):
        # Constants of the compiler are checked where they are used.
        if re.match(r"\s*(//|#|typedef|static_assert|(static )?constexpr int|template <[^{]*$)", line):
            continue
        end = len(line) if "  // " not in line else line.index("  // ")
        for kind, pattern, how in RULES:
            if number < code and kind not in ("barrier", "wait"):
                continue
            for match in re.finditer(pattern, line[:end]):
                after = line[: match.start()] + re.sub(pattern, how, line[match.start() : end], count=1) + line[end:]
                if after != line:
                    yield Mutant(kind, number, line, after, lines[number - 2])


def isolated(function: Callable[[], str], seconds: float) -> str:
    """What a function returns in a process of its own, which a mutant may crash or keep from ending."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(write, function().encode()[:4000] or b" ")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], seconds)[0]:
            os.kill(process, signal.SIGKILL)
            return "did not end"
        return os.read(read, 4000).decode(errors="replace") or "crashed"
    finally:
        os.close(read)
        os.waitpid(process, 0)
