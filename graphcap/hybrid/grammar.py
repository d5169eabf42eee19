"""Reading a layer pattern: the grammar, and an arrow under what does not fit it. `pattern.py` is the way in.

    pattern  := main [ "/" mtp { "/" mtp } ]     all mtp strings identical, or all empty
    main     := segment { "|" segment }          a segment may be empty
    segment  := { item }
    item     := symbol | "[" symbol { symbol } "]"
    mtp      := symbol { symbol }
    symbol   := "M" Mamba-2 | "*" attention | "-" dense MLP | "E" mixture of experts

The language is the one of Megatron-LM's hybrid models, with the layer groups of its pull request for hybrid EP overlap;
`G`, `D` and `+`, which it also has, are recognised and refused. Stricter than there: a group holds one layer of each
family and its `-` or `E` stands last; main and MTP layers use one kind of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from graphcap.errors import PatternError

Item = str | tuple[str, ...]
"""One logical layer: a symbol, or a group as the tuple of its symbols."""

SYMBOLS: Final = MappingProxyType({"M": "Mamba-2", "*": "attention", "-": "dense MLP", "E": "mixture of experts"})
UNSUPPORTED: Final = MappingProxyType({"G": "gated delta net", "D": "sparse attention", "+": "latent attention"})

# Members of a group share one checkpoint prefix, so two layers of a family would share their keys.
_FAMILIES = dict(zip("MG*D+-E", ("mixer", "delta net", *("attention",) * 3, *("MLP",) * 2), strict=True))


def pattern_error(text: str, column: int, why: str) -> PatternError:
    """A PatternError that shows `text` as given on a line of its own, with an arrow under `column`."""
    # A line break inside the text starts a new line on the screen: count from there.
    shown = column - (text.rfind("\n", 0, column) + 1)
    return PatternError(f"layer pattern, column {column + 1}: {why}.\n{text}\n{' ' * shown}^")


@dataclass(frozen=True, slots=True)
class _Placed:
    """An item and the columns of its symbols."""

    item: Item
    columns: tuple[int, ...]


def read(text: str) -> tuple[tuple[tuple[Item, ...], ...], str, int]:
    """Segments, MTP symbols and depth. The checks come in the order of Megatron's parser, then our stricter ones, so
    that a text which both refuse is refused for the same reason."""
    if not isinstance(text, str):
        raise PatternError(f"a layer pattern is a text such as 'M[M*]-', not {type(text).__name__}: {text!r}")
    main, *mtp_parts = text.split("/")
    segments: list[tuple[_Placed, ...]] = []
    column = 0
    for part in main.split("|"):
        segments.append(tuple(_read_segment(text, column, column + len(part))))
        column += len(part) + 1
    used = [place for segment in segments for placed in segment for place in placed.columns]
    _check_attention(text, used, "the main pattern")
    mtp = _read_mtp(text, len(main) + 1, mtp_parts)
    used += [len(main) + 1 + i for i in range(len(mtp))]
    _check_attention(text, used, "main and MTP layers")
    for column in used:
        if text[column] in UNSUPPORTED:
            what = f"{text[column]!r} ({UNSUPPORTED[text[column]]})"
            raise pattern_error(text, column, f"{what} layers are not supported: expected one of {listed(SYMBOLS)}")
    for segment in segments:
        for placed in segment:
            if isinstance(placed.item, tuple):
                _check_group(text, placed)
    return tuple(tuple(p.item for p in segment) for segment in segments), mtp, len(mtp_parts) if mtp else 0


def _read_segment(text: str, start: int, stop: int) -> list[_Placed]:
    """The items of `text[start:stop]`."""
    items: list[_Placed] = []
    column = start
    while column < stop:
        if text[column] == "]":
            raise pattern_error(text, column, "']' closes a layer group that was not opened: expected '[' before it")
        if text[column] == "[":
            close = text.find("]", column, stop)
            items.append(_read_group(text, column, stop, close))
            column = close
        else:
            _check_symbol(text, column)
            items.append(_Placed(text[column], (column,)))
        column += 1
    return items


def _read_group(text: str, start: int, stop: int, close: int) -> _Placed:
    """The group that opens at `start` and closes at `close` (-1: nowhere before `stop`)."""
    if close < 0:
        ends = f"before {text[stop]!r}" if stop < len(text) else "at the end"
        raise pattern_error(text, start, f"'[' opens a layer group without ']': expected ']' {ends}")
    inner = text.find("[", start + 1, close)
    if inner >= 0:
        raise pattern_error(text, inner, "nested layer groups are not supported: expected ']' before the next '['")
    if close == start + 1:
        raise pattern_error(text, close, "a layer group cannot be empty: expected a symbol between '[' and ']'")
    columns = tuple(range(start + 1, close))
    for column in columns:
        _check_symbol(text, column)
    for column in columns[:-1]:
        if text[column] == "E":
            raise pattern_error(text, column, "'E' must be the last symbol of its group: expected ']' after it")
    return _Placed(tuple(text[start + 1 : close]), columns)


def _read_mtp(text: str, start: int, parts: list[str]) -> str:
    """The symbols of one MTP depth; the first part stands at column `start`."""
    if not any(parts):
        return ""
    column = start
    for part in parts:
        if part != parts[0]:
            same = next((i for i, (a, b) in enumerate(zip(part, parts[0], strict=False)) if a != b), None)
            differs = column + (min(len(part), len(parts[0])) if same is None else same)
            raise pattern_error(text, differs, f"all MTP depths must be identical: expected {parts[0]!r}, not {part!r}")
        column += len(part) + 1
    for column in range(start, start + len(parts[0])):
        if text[column] == "|":
            why = "'|' is not allowed in MTP layers, which all stand on the last stage: expected a symbol"
            raise pattern_error(text, column, why)
        if text[column] in "[]":
            raise pattern_error(text, column, "layer groups are not supported in MTP layers: expected a symbol")
        _check_symbol(text, column)
    return parts[0]


def _check_symbol(text: str, column: int) -> None:
    char = text[column]
    if char in SYMBOLS or char in UNSUPPORTED:
        return
    hint = ""
    if char.isspace():
        hint = " (whitespace is not allowed)"
    elif char.upper() in SYMBOLS:
        hint = f" (symbols are upper case: {char.upper()!r})"
    raise pattern_error(text, column, f"{char!r} is not a valid layer symbol{hint}: expected one of {listed(SYMBOLS)}")


def _check_attention(text: str, columns: list[int], where: str) -> None:
    """`*` does not go with `D` or `+`; `D` and `+` go together."""
    kinds = [column for column in columns if text[column] in "*D+"]
    for column in kinds:
        if (text[column] == "*") != (text[kinds[0]] == "*"):
            why = f"{text[column]!r} and {text[kinds[0]]!r} mix kinds of attention in {where}: expected one kind"
            raise pattern_error(text, column, why)


def _check_group(text: str, group: _Placed) -> None:
    """Our own rules for a group: `-` stands last, no two members of one family."""
    for column in group.columns[:-1]:
        if text[column] == "-":
            raise pattern_error(text, column, "'-' must be the last symbol of its group: expected ']' after it")
    seen: dict[str, str] = {}
    for column in group.columns:
        family = _FAMILIES[text[column]]
        if family in seen:
            raise pattern_error(
                text,
                column,
                f"{seen[family]!r} and {text[column]!r} of one group are both of the family {family!r} and would "
                "share their checkpoint keys: expected one of each family in a group",
            )
        seen[family] = text[column]


def listed(symbols: Iterable[str]) -> str:
    return " ".join(symbols)
