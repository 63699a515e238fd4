"""What the tutorial's tests read from a launcher's output, however that was cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.e2e import tutorial

LINES = "strategy horovod, launcher openmpi, 2 ranks, 1 nodes\nchecksum of the weights 21.4\ntest accuracy 0.95\n"
FOUND = {"strategy": "horovod", "launcher": "openmpi", "ranks": "2", "nodes": "1", "checksum": "21.4",
         "accuracy": "0.95"}  # fmt: skip
OTHERS = {"[1,0]<stderr>:": "a warning without an end", "[1,1]<stdout>:": "", "[1,1]<stderr>:": "one\n\ntwo\n"}


def tagged(tag: str, piece: str) -> str:
    """As Open MPI writes what one read gave it: the tag before it, and after each line break but a last one."""
    return tag + piece[:-1].replace("\n", f"\n{tag}") + piece[-1]


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


@given(st.data())
def test_every_cut_is_read_the_same(data: st.DataObject) -> None:
    cuts = st.lists(st.integers(0, len(LINES)), max_size=12)
    queues = {tag: pieces(text, data.draw(cuts)) for tag, text in {"[1,0]<stdout>:": LINES, **OTHERS}.items()}
    output = data.draw(st.sampled_from(["", "a note of the launcher's\n"]))
    while waiting := [tag for tag, queue in queues.items() if queue]:
        tag = data.draw(st.sampled_from(waiting))
        output += tagged(tag, queues[tag].pop(0))
    assert tutorial.results(output) == [FOUND]


def test_output_without_tags_is_read_as_it_is() -> None:
    assert tutorial.results(f"epoch 1\n{LINES}") == [FOUND]
    assert tutorial.results(LINES + LINES) == [FOUND, FOUND]
