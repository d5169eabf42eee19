"""The pattern language: every row of the example tables of the reference, as it comes out in our stricter grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcap.errors import PatternError
from graphcap.hybrid import Pattern, Segment

# text, items per segment, MTP symbols, MTP depth, physical layers
GOOD = [
    ("M*M*", [("M", "*", "M", "*")], "", 0, 4),
    ("*-", [("*", "-")], "", 0, 2),
    ("[*-]", [(("*", "-"),)], "", 0, 2),
    ("[*E]", [(("*", "E"),)], "", 0, 2),
    ("M[M*]-", [("M", ("M", "*"), "-")], "", 0, 4),
    ("[M*E]", [(("M", "*", "E"),)], "", 0, 3),
    ("M[M*]E", [("M", ("M", "*"), "E")], "", 0, 4),
    ("[E]", [(("E",),)], "", 0, 1),
    ("[M]", [(("M",),)], "", 0, 1),
    ("[ME][M*E]", [(("M", "E"), ("M", "*", "E"))], "", 0, 5),
    ("[*-]/*E", [(("*", "-"),)], "*E", 1, 2),
    ("[*-]/*-*E", [(("*", "-"),)], "*-*E", 1, 2),  # upstream: parses, its overlap builder refuses the MTP stack
    ("[*-][*-]|[*E][*E]/*E", [(("*", "-"),) * 2, (("*", "E"),) * 2], "*E", 1, 8),
    ("M*M*/MM/MM", [("M", "*", "M", "*")], "MM", 2, 4),
    ("M-M-|M-M*-/MM/MM", [("M", "-", "M", "-"), ("M", "-", "M", "*", "-")], "MM", 2, 9),
    ("M*M*/", [("M", "*", "M", "*")], "", 0, 4),
    ("M*M*//", [("M", "*", "M", "*")], "", 0, 4),
    ("/MM/MM", [()], "MM", 2, 0),  # upstream: main is None
    ("", [()], "", 0, 0),
    ("||M*", [(), (), ("M", "*")], "", 0, 2),
    ("M*|", [("M", "*"), ()], "", 0, 2),
    ("M-*MM*-*M-", [tuple("M-*MM*-*M-")], "", 0, 10),  # the deprecated ratio form's own examples, as patterns
    ("MM*-M*M-", [tuple("MM*-M*M-")], "", 0, 8),
    ("M-M-M-*-M-M-", [tuple("M-M-M-*-M-M-")], "", 0, 12),
]

# text, column (from 0) of the arrow, words of the sentence
BAD = [
    ("[*-M]", 2, "'-' must be the last"),  # stricter: upstream parses these three, its overlap builder refuses them
    ("[--]", 1, "'-' must be the last"),
    ("[-E]", 1, "'-' must be the last"),
    ("[MM*E]", 2, "checkpoint keys"),  # stricter: upstream parses it, and its checkpoint keys collide
    ("[**-]", 2, "checkpoint keys"),  # stricter, likewise
    ("[M*M]", 3, "checkpoint keys"),  # stricter, likewise
    ("[EM]", 1, "'E' must be the last"),
    ("M[EM]", 2, "'E' must be the last"),
    ("[]", 1, "cannot be empty"),
    ("M[]", 2, "cannot be empty"),
    ("[", 0, "without ']'"),
    ("[*-", 0, "without ']'"),
    ("M[M*", 1, "without ']'"),
    ("]", 0, "not opened"),
    ("M]", 1, "not opened"),
    ("[[*]-]", 1, "nested"),
    ("M[[M]]", 2, "nested"),
    ("M[M[*]]", 3, "nested"),
    ("[M|*]", 0, "without ']': expected ']' before '|'"),
    ("[M/*]", 0, "without ']': expected ']' before '/'"),
    ("[*-]X", 4, "'X' is not a valid layer symbol"),
    ("M[M*]X", 5, "'X' is not a valid layer symbol"),
    ("[*+]", 2, "mix kinds of attention"),
    ("*-/[*E]", 3, "groups are not supported in MTP"),
    ("*-/*]", 4, "groups are not supported in MTP"),
    ("M*M*/MM/M*", 9, "must be identical"),
    ("M*M*/MM/", 8, "must be identical"),
    ("M*M*/MM/Ma", 9, "must be identical"),  # compared before the symbols are
    ("M*M*/M|M", 6, "'|' is not allowed in MTP"),
    ("M*/Ma", 4, "'a' is not a valid layer symbol"),
    ("M*|D", 3, "mix kinds of attention in the main pattern"),
    ("MD*", 2, "mix kinds of attention in the main pattern"),
    ("M+M*-", 3, "mix kinds of attention in the main pattern"),
    ("M*/D", 3, "mix kinds of attention in main and MTP layers"),  # stricter: upstream accepts it
    ("MD+", 1, "'D' (sparse attention) layers are not supported"),  # stricter: upstream's next three rows are fine
    ("M+M+", 1, "'+' (latent attention) layers are not supported"),
    ("[G*E]", 1, "'G' (gated delta net) layers are not supported"),
    ("M*/G", 3, "'G' (gated delta net) layers are not supported"),
    ("MX", 1, "'X' is not a valid layer symbol"),
    ("M M", 1, "whitespace is not allowed"),
    ("m", 0, "symbols are upper case: 'M'"),
]


@pytest.mark.parametrize(("text", "segments", "mtp", "depth", "physical"), GOOD)
def test_parsed(text: str, segments: list[tuple[object, ...]], mtp: str, depth: int, physical: int) -> None:
    pattern = Pattern.parse(text)
    assert list(pattern.segments) == segments
    assert (pattern.mtp, pattern.mtp_depth, pattern.physical_layers) == (mtp, depth, physical)
    assert Pattern.parse(str(pattern)) == pattern
    assert str(pattern) == (text if pattern.mtp else text.rstrip("/"))


@pytest.mark.parametrize(("text", "column", "words"), BAD)
def test_refused(text: str, column: int, words: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text)
    sentence, quoted, arrow = str(caught.value).split("\n")
    assert words in sentence
    assert "expected" in sentence
    assert quoted == text
    assert arrow == " " * column + "^"


def test_not_a_text() -> None:
    with pytest.raises(PatternError, match="not NoneType"):
        Pattern.parse(None)  # type: ignore[arg-type]


def test_numberings() -> None:
    layers = Pattern.parse("M[M*]|-").layers
    assert [(l.symbol, l.number, l.logical, l.segment) for l in layers] == [
        ("M", 1, 0, 0),
        ("M", 2, 1, 0),
        ("*", 3, 1, 0),
        ("-", 4, 2, 1),
    ]


def test_counts_and_maps() -> None:
    assert Pattern.parse("[*-]M|[*E]/ME/ME").counts() == {"*": 2, "-": 1, "M": 3, "E": 3}
    pattern = Pattern.parse("[M*E]M")
    assert pattern.layer_map("M") == {0: 0, 3: 1}
    assert pattern.layer_map("*") == {1: 0}
    assert pattern.layer_map("E") == {2: 0}
    assert pattern.layer_map("-") == {}
    with pytest.raises(PatternError, match="expected one of"):
        pattern.layer_map("G")


def test_flat_and_grouped() -> None:
    pattern = Pattern.parse("M[M*]-|[E]/ME/ME")
    assert str(pattern.flat()) == "MM*-|E/ME/ME"
    assert pattern.grouped
    assert not pattern.flat().grouped
    assert pattern.flat().logical_layers == pattern.physical_layers == 5
    assert pattern.logical_layers == 4


FOUR = "[*-][*-]|[*-][*-]|[*E][*E]|[*E][*E]"
# text, pp rank, pp size, vp stage, extra, items, physical offset, logical offset
STAGES = [
    (FOUR, 0, 2, 0, {}, "[*-][*-]", 0, 0),
    (FOUR, 1, 2, 0, {}, "[*-][*-]", 4, 2),
    (FOUR, 0, 2, 1, {}, "[*E][*E]", 8, 4),
    (FOUR, 1, 2, 1, {}, "[*E][*E]", 12, 6),
    ("[*-][*-]|[*E][*E]", 0, 1, 1, {}, "[*E][*E]", 4, 2),
    ("[M*E]|M-", 0, 1, 1, {}, "M-", 3, 1),
    ("M-M-|M-M*-", 1, 2, None, {}, "M-M*-", 4, 4),
    ("*-*-|*-*-|*-*-|*-*-", 2, 4, None, {}, "*-*-", 8, 8),
    ("||M*", 0, 3, None, {}, "", 0, 0),
    ("||M*", 2, 3, None, {}, "M*", 0, 0),
    ("[*-][*E]", 1, 2, None, {}, "[*E]", 2, 1),
    ("[M*E]M", 1, 2, None, {"first_stage_layers": 3}, "M", 3, 1),
    ("[M*E]M", 0, 2, None, {"last_stage_layers": 1}, "[M*E]", 0, 0),
    ("MMMM*", 1, 4, None, {"first_stage_layers": 1, "last_stage_layers": 2}, "M", 1, 1),
    ("M*", 0, 1, None, {}, "M*", 0, 0),
    ("M*", 0, 1, 0, {}, "M*", 0, 0),
    ("", 1, 2, None, {}, "", 0, 0),
    ("M", 1, 2, None, {"first_stage_layers": 0}, "M", 0, 0),
]

BAD_STAGES = [
    # Stricter: upstream lets rank 0 go on in the first row, where ranks 1 and 2 raise.
    *[("M[*E]", rank, 3, None, {}, "would split a group") for rank in range(3)],
    *[("M[*E]M", rank, 2, None, {}, "would split a group") for rank in range(2)],
    ("M*|M*", 0, 2, None, {"first_stage_layers": 1}, "drop first_stage_layers"),
    ("M*|M*", 0, 2, None, {"last_stage_layers": 1}, "drop first_stage_layers"),
    ("M*|M*|M*", 0, 2, None, {}, "multiple of pp_size=2"),
    ("M*M*", 0, 2, 0, {}, "virtual stages need pipes"),
    ("M*", 0, 1, 1, {}, "out of range"),
    ("M*|M*", 0, 1, 2, {}, "out of range"),
    ("M*M", 0, 2, None, {}, "do not split over 2 ranks"),
    ("M*M*", 0, 3, None, {"first_stage_layers": 1}, "3 layers are left for 2 stages"),
    ("M*M*", 0, 2, None, {"first_stage_layers": 1, "last_stage_layers": 1}, "2 layers are left for 0 stages"),
    ("M*M*", 0, 2, None, {"first_stage_layers": 9}, "do not split"),
    ("M*M*", 0, 1, None, {"first_stage_layers": 4}, "pp_size of at least 2"),
    ("M*M*", 2, 2, None, {}, "pp_rank=2"),
    ("M*M*", -1, 2, None, {}, "pp_rank=-1"),
    ("M*M*", 0, 0, None, {}, "pp_size=0"),
    ("M*M*", 0, 2, None, {"first_stage_layers": -1}, "first_stage_layers=-1"),
    ("M*|M*", 0, 1, True, {}, "vp_stage=True"),
    # Stricter: upstream gives segment 0 and says nothing of the others.
    ("M*|M*", 0, 1, None, {}, "pass vp_stage"),
]


@pytest.mark.parametrize(("text", "rank", "size", "stage", "extra", "items", "physical", "logical"), STAGES)
def test_stage(
    text: str, rank: int, size: int, stage: int | None, extra: dict[str, int], items: str, physical: int, logical: int
) -> None:
    segment = Pattern.parse(text).segment(rank, size, stage, **extra)
    assert segment == Segment(Pattern.parse(items).items, physical, logical)
    assert str(segment) == items
    assert segment.physical_layers == Pattern.parse(items).physical_layers


@pytest.mark.parametrize(("text", "rank", "size", "stage", "extra", "words"), BAD_STAGES)
def test_stage_refused(
    text: str, rank: int, size: int, stage: int | None, extra: dict[str, int], words: str
) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text).segment(rank, size, stage, **extra)
    sentence, quoted, arrow = str(caught.value).split("\n")
    assert words in sentence
    assert quoted == text
    assert arrow.strip() == "^"
    assert len(arrow) <= max(1, len(text))


def test_a_cut_group_is_pointed_at() -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse("M[*E]").segment(0, 3)
    assert str(caught.value).endswith("\nM[*E]\n   ^")


GROUPS = st.sampled_from(["", "M", "*", "M*", "*M"]).flatmap(lambda pre: st.sampled_from([pre, f"{pre}-", f"{pre}E"]))
ITEMS = st.one_of(st.sampled_from("M*-E"), GROUPS.filter(bool).map(lambda inner: f"[{inner}]"))
SEGMENTS = st.lists(ITEMS, max_size=6).map("".join)
MAINS = st.lists(SEGMENTS, min_size=1, max_size=4).map("|".join)
PATTERNS = st.builds(
    lambda main, mtp, depth: main + f"/{mtp}" * depth * bool(mtp), MAINS, st.text("M*-E", max_size=3), st.integers(0, 3)
)


@given(PATTERNS)
def test_round_trip(text: str) -> None:
    pattern = Pattern.parse(text)
    assert str(pattern) == text
    assert Pattern.parse(str(pattern)) == pattern
    assert sum(pattern.counts().values()) == pattern.physical_layers + len(pattern.mtp) * pattern.mtp_depth
    assert [layer.number for layer in pattern.layers] == list(range(1, pattern.physical_layers + 1))


@given(MAINS, st.integers(1, 4))
def test_stages_make_up_the_pattern(text: str, size: int) -> None:
    """Whatever the split, the stages in order hold every layer once, with the right offsets; or every rank refuses."""
    pattern = Pattern.parse(text)
    stages = max(1, len(pattern.segments) // size) if len(pattern.segments) > 1 else 1
    asked = [(rank, stage if len(pattern.segments) > 1 else None) for stage in range(stages) for rank in range(size)]
    found: list[Segment | None] = []
    for rank, stage in asked:
        try:
            found.append(pattern.segment(rank, size, stage))
        except PatternError:
            found.append(None)
    if None in found:
        assert set(found) == {None}
        return
    physical = logical = 0
    for segment in found:
        assert segment is not None
        assert (segment.physical_offset, segment.logical_offset) == (physical, logical)
        physical += segment.physical_layers
        logical += len(segment.items)
    assert (physical, logical) == (pattern.physical_layers, pattern.logical_layers)


@given(st.one_of(st.text("M*-E[]|/GD+ mX\n", max_size=12), st.text(max_size=12)))
def test_any_text_parses_or_is_refused(text: str) -> None:
    refused = None
    try:
        pattern = Pattern.parse(text)
    except PatternError as error:
        refused = str(error)
    if refused is None:
        assert Pattern.parse(str(pattern)) == pattern
    else:
        assert f"\n{text}\n" in refused
        assert refused.endswith("^")
