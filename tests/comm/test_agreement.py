"""Members that are about to do different things are stopped, and told who differs in what."""

from __future__ import annotations

import pytest

from thinwire.comm import Description, InProcessTransport, Recording, agree, run_members
from thinwire.errors import AgreementError

SAME = {"algorithm": "PowerSGD", "matrix_rank": "2", "bucket": "weight, bias"}


def said_by(descriptions: list[Description]) -> list[tuple[str, list[str]]]:
    """What each member hears, and the collectives that it took."""
    members = InProcessTransport.group(len(descriptions))

    def body(rank: int) -> tuple[str, list[str]]:
        recording = Recording(members[rank])
        try:
            agree(recording, descriptions[rank], "step 3")
        except AgreementError as error:
            return str(error), [note.collective for note in recording.notes]
        return "", [f"{note.collective} of {note.handed_bytes}" for note in recording.notes]

    return run_members(len(descriptions), body)


def test_members_that_say_the_same_go_on_after_one_gather_of_digests() -> None:
    in_another_order = dict(reversed(SAME.items()))
    assert said_by([SAME, in_another_order, SAME]) == [("", ["all_gather of 32"])] * 3


def test_a_group_of_one_sends_nothing() -> None:
    assert said_by([SAME]) == [("", [])]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            SAME | {"bucket": "bias", "matrix_rank": "3"},
            "processes 0, 2 have matrix_rank 2, process 1 has matrix_rank 3; "
            "processes 0, 2 have bucket weight, bias, process 1 has bucket bias",
        ),
        (SAME | {"scale": "1 – é – " + 999 * "x"}, "no scale, process 1 has scale 1 – é – xxx"),
    ],
    ids=["two", "longer"],
)
def test_all_are_told_who_differs_in_what(other: Description, words: str) -> None:
    said = said_by([SAME, other, SAME])
    assert len({words for words, _ in said}) == 1
    for message, collectives in said:
        assert message.startswith("step 3: ")
        assert words in message
        assert "nothing was changed" in message
        assert collectives == ["all_gather"] * 3
