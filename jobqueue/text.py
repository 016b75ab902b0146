"""Text from jobs made fit for a line of a terminal or a log.

Pure functions; whatever is shown to people, by whichever command, passes through `escape`.
"""

from __future__ import annotations

import re

# C0 and C1 controls and DEL; soft hyphen; zero-width, joining and direction marks; line and
# paragraph separators; embeddings, overrides and isolates; invisible operators; the byte
# order mark; interlinear annotation; lone surrogates; the tag block.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape(text: str) -> str:
    r"""Return text fit for one line of a terminal: what is unsafe becomes `\n`, `\x1b`, `\u202e`."""
    return text if text.isascii() and text.isprintable() else UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
