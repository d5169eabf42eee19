"""Layer patterns: which layers a hybrid model has, in which order, groups and pipeline segments.

The language is described in `grammar.py`. Two numberings: physical (one per layer: layer numbers, quantisation
contexts, state slots) and logical (one per item, a group counts once: checkpoint keys, schedule units). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphcap.errors import PatternError
from graphcap.hybrid.grammar import SYMBOLS, Item, listed, pattern_error, read


@dataclass(frozen=True, slots=True)
class PatternLayer:
    """One physical layer of the main pattern; all numbers start at 0 except `number`.

    symbol: one of `M * - E`. number: the physical layer number, from 1 (quantisation contexts, trackers, state slots).
    logical: index of its item (checkpoint keys, schedule units); members of a group share it. segment: its segment.
    """

    symbol: str
    number: int
    logical: int
    segment: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What one pipeline stage holds: its items, and how many physical and logical layers come before them."""

    items: tuple[Item, ...]
    physical_offset: int
    logical_offset: int

    @property
    def physical_layers(self) -> int:
        return physical_count(self.items)

    def __str__(self) -> str:
        return items_text(self.items)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. `Pattern.parse("M[M*]-")` and `Pattern("M[M*]-")` are the same; what can't be read raises
    PatternError, which shows the text with an arrow under the character.

    text: as it was given; two patterns are equal when they mean the same. segments: the items of each segment.
    mtp: the symbols of one MTP depth, "" if there are none. mtp_depth: how many times they come.
    """

    text: str = field(compare=False)
    segments: tuple[tuple[Item, ...], ...] = field(init=False)
    mtp: str = field(init=False)
    mtp_depth: int = field(init=False)

    def __post_init__(self) -> None:
        segments, mtp, depth = read(self.text)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "mtp", mtp)
        object.__setattr__(self, "mtp_depth", depth)

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern that `text` stands for; PatternError if it is none."""
        return cls(text)

    # ----------------------------------------------------------------------------------------------------- numberings

    @property
    def items(self) -> tuple[Item, ...]:
        """The logical layers of all segments, in order."""
        return tuple(item for segment in self.segments for item in segment)

    @property
    def layers(self) -> tuple[PatternLayer, ...]:
        """The physical layers of the main pattern, in order."""
        layers: list[PatternLayer] = []
        logical = 0
        for index, segment in enumerate(self.segments):
            for item in segment:
                for symbol in item:
                    layers.append(PatternLayer(symbol, len(layers) + 1, logical, index))
                logical += 1
        return tuple(layers)

    @property
    def physical_layers(self) -> int:
        """Layers of the main pattern, MTP not counted."""
        return physical_count(self.items)

    @property
    def logical_layers(self) -> int:
        """Items of the main pattern: a group counts once."""
        return len(self.items)

    @property
    def grouped(self) -> bool:
        """Whether any segment has a group."""
        return any(isinstance(item, tuple) for item in self.items)

    def counts(self) -> dict[str, int]:
        """Physical layers per symbol, MTP layers times their depth included; symbols that do not occur count 0."""
        main = "".join(layer.symbol for layer in self.layers)
        return {symbol: main.count(symbol) + self.mtp.count(symbol) * self.mtp_depth for symbol in SYMBOLS}

    def layer_map(self, symbol: str) -> dict[int, int]:
        """Physical index (from 0) of each main layer of this kind -> its place among its kind: the state slots."""
        if symbol not in SYMBOLS:
            raise self._complaint(None, f"layer_map({symbol!r}): expected one of {listed(SYMBOLS)}")
        places = [layer.number - 1 for layer in self.layers if layer.symbol == symbol]
        return {physical: place for place, physical in enumerate(places)}

    def flat(self) -> Pattern:
        """The same layers without groups."""
        return Pattern("|".join("".join(map("".join, segment)) for segment in self.segments) + self._mtp_text())

    # -------------------------------------------------------------------------------------------------------- pipeline

    def segment(
        self,
        pp_rank: int,
        pp_size: int,
        vp_stage: int | None = None,
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
    ) -> Segment:
        """What pipeline rank `pp_rank` of `pp_size` holds at virtual stage `vp_stage`.

        With pipes, the segment `vp_stage * pp_size + pp_rank`. Without, an even split of the physical layers, where the
        first or last stage may be given its own number; all ranks' splits are checked on every rank, so that no rank
        goes on where another one raises. PatternError if the numbers do not fit the pattern.
        """
        self._whole("pp_size", pp_size, 1, None)
        self._whole("pp_rank", pp_rank, 0, pp_size)
        for name, value in (
            ("vp_stage", vp_stage),
            ("first_stage_layers", first_stage_layers),
            ("last_stage_layers", last_stage_layers),
        ):
            if value is not None:
                self._whole(name, value, 0, None)
        if len(self.segments) == 1:
            return self._split(pp_rank, pp_size, vp_stage, first_stage_layers, last_stage_layers)
        if first_stage_layers is not None or last_stage_layers is not None:
            why = "pipes already say what each stage holds: drop first_stage_layers and last_stage_layers"
            raise self._complaint("|", why)
        stages, rest = divmod(len(self.segments), pp_size)
        if rest:
            why = f"has {len(self.segments)} segments, expected a multiple of pp_size={pp_size}"
            raise self._complaint("|", f"the pattern {why}")
        if vp_stage is None and stages > 1:
            why = f"gives each of {pp_size} ranks {stages} segments: pass vp_stage, from 0 to {stages - 1}"
            raise self._complaint("|", f"the pattern {why}")
        index = (vp_stage or 0) * pp_size + pp_rank
        if index >= len(self.segments):
            raise self._complaint(None, f"vp_stage={vp_stage} is out of range: expected 0 to {stages - 1}")
        before = tuple(item for segment in self.segments[:index] for item in segment)
        return Segment(self.segments[index], physical_count(before), len(before))

    def _split(
        self, pp_rank: int, pp_size: int, vp_stage: int | None, first: int | None, last: int | None
    ) -> Segment:
        """The share of `pp_rank` in a pattern without pipes."""
        if vp_stage is not None and pp_size > 1:
            raise self._complaint(None, "virtual stages need pipes: write one segment per stage, as in M*|M-")
        if vp_stage:
            raise self._complaint(None, f"vp_stage={vp_stage} is out of range: expected 0, the pattern has one segment")
        sizes = self._stage_sizes(pp_size, first, last)
        starts = {0: 0}  # physical offset -> logical offset, at every item
        for item in self.items:
            starts[max(starts) + len(item)] = len(starts)
        cuts = [sum(sizes[:rank]) for rank in range(pp_size + 1)]
        for rank, cut in enumerate(cuts):
            if cut not in starts:
                raise self._complaint(
                    None,
                    f"the cut after {cut} layers, between ranks {rank - 1} and {rank} of {pp_size}, would split a "
                    "group: expected a cut between items (write the segments with pipes)",
                    column=self._column_of(cut),
                )
        start, stop = starts[cuts[pp_rank]], starts[cuts[pp_rank + 1]]
        return Segment(self.items[start:stop], cuts[pp_rank], start)

    def _stage_sizes(self, pp_size: int, first: int | None, last: int | None) -> list[int]:
        """Physical layers per rank."""
        total = self.physical_layers
        given = [name for name, value in (("first", first), ("last", last)) if value is not None]
        if len(given) > pp_size or (given and pp_size == 1):
            raise self._complaint(None, f"a {given[0]} stage of its own needs a pp_size of at least 2, not {pp_size}")
        middle, ranks = total - (first or 0) - (last or 0), pp_size - len(given)
        if middle < 0 or (middle and not ranks) or (ranks and middle % ranks):
            raise self._complaint(
                None,
                f"{total} physical layers do not split over {pp_size} ranks"
                + (f": {middle} layers are left for {ranks} stages" if given else "")
                + ": expected an even split (write the segments with pipes, or pass first_ or last_stage_layers)",
            )
        share = middle // ranks if ranks else 0
        head = [] if first is None else [first]
        tail = [] if last is None else [last]
        return head + [share] * ranks + tail

    def _whole(self, name: str, value: object, low: int, below: int | None) -> None:
        """Refuse what is not a whole number from `low` on and, if given, under `below`."""
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value
        if not fits or (isinstance(value, int) and below is not None and value >= below):
            span = f"at least {low}" if below is None else f"from {low} to {below - 1}"
            raise self._complaint(None, f"{name}={value!r}: expected a whole number, {span}")

    def _column_of(self, physical: int) -> int:
        """The column in `text` of the physical layer with this index (from 0)."""
        columns = [column for column, char in enumerate(self.text.partition("/")[0]) if char in SYMBOLS]
        return columns[physical]

    def _complaint(self, mark: str | None, why: str, column: int | None = None) -> PatternError:
        """An error that points at the first `mark`, at `column`, or at the start."""
        where = self.text.find(mark) if mark is not None else column or 0
        return pattern_error(self.text, where, why)

    # ------------------------------------------------------------------------------------------------------------ text

    def __str__(self) -> str:
        return "|".join(map(items_text, self.segments)) + self._mtp_text()

    def _mtp_text(self) -> str:
        return f"/{self.mtp}" * self.mtp_depth


def items_text(items: tuple[Item, ...]) -> str:
    """Items as they are written in a pattern."""
    return "".join(item if isinstance(item, str) else f"[{''.join(item)}]" for item in items)


def physical_count(items: tuple[Item, ...]) -> int:
    """Physical layers of some items: a symbol is one, a group its length."""
    return sum(map(len, items))
