"""Text from jobs made fit for a line of a terminal or a log.

Pure functions; whatever is shown to people, by whichever command, passes through `escape`,
and whatever is written as JSON through `escape_json`.
"""

from __future__ import annotations

import re

# Whatever drives a terminal, reorders text, or is not seen: controls (C0, DEL, C1), format characters, line
# and paragraph separators (Unicode's Cc, Cf, Zl, Zp), lone surrogates, and all that is ignored by default:
# joiners, fillers, variation selectors, tags.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape(text: str) -> str:
    r"""Return text fit for one line of a terminal: what is unsafe becomes `\n`, `\x1b`, `\u202e`."""
    return text if text.isascii() and text.isprintable() else UNSAFE.sub(_escaped, text)


def headline(error: str) -> str:
    """Return an error without the indented lines of its traceback."""
    return error.partition("\n  ")[0]


def escape_json(line: str) -> str:
    r"""Return a line of JSON that means the same, with what is unsafe written as `\u202e`."""
    return line if line.isascii() and line.isprintable() else UNSAFE.sub(_escaped_in_json, line)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped_in_json(match: re.Match[str]) -> str:
    # It can only stand inside a string: between the values of a line there is nothing but spaces.
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))
