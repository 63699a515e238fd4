"""A case: one small training, drawn at random and printed as a literal for examples.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from hypothesis import strategies as st

from tests.dist.engines import engine_of
from tests.search import values
from tests.search.ranks import Place

PLACES = [
    Place("single", 1),
    *(Place(name, size) for name in ("ddp", "fsdp") for size in (1, 2, 3, 4)),
    *(Place(f"deepspeed-{stage}", size) for stage in range(4) for size in (1, 2, 4)),
    *(Place("horovod", size) for size in (1, 2, 4)),
]
# A place for each way of working: examples are compared there.
SOME = [
    *(Place("single", 1), Place("ddp", 2), Place("fsdp", 1), Place("fsdp", 2), Place("fsdp", 3)),
    *(Place("deepspeed-0", 1), Place("deepspeed-2", 2), Place("deepspeed-3", 2), Place("horovod", 2)),
]
# What every run of the tests must have tried; `Case.dimensions` gives the names.
REQUIRED = (
    *("tied", "tied blocks", "shared", "frozen", "conditional", "buffers", "scalar", "double", "blocks", "exact"),
    *("loader map", "loader dict", "loader images", "loader sampler", "loader hidden", "loader batches"),
    *("loader stream", "loader ready", "loader graph", "uneven", "pair then", "pair zip", "accumulate", "weighted"),
    *("optimizer sgd", "optimizer momentum", "optimizer adamw", "optimizer adagrad", "groups two", "groups empty"),
    *("second half", "second model", "clear first", "scheduler step", "scheduler epoch", "clip 2", "clip inf"),
    *("precision fp32", "precision bf16", "precision fp16", "forward between", "unwrapped between"),
    *("evaluate between", "validate", "resume inside", "resume asked", "resume between", "resume end"),
    *("fsdp keeps weights gathered", "fsdp in bf16", "values of reduce", "values of gather", "values of broadcast"),
)
PARTS = ("tied", "shared", "frozen", "conditional", "buffers", "scalar", "double", "blocks", "tied blocks")
STREAMS = ("stream", "ready", "graph")  # iterable datasets
UNITS = ("batches", "ready", "graph")  # loaders whose batches are made elsewhere


def there(places: Sequence[Place] = tuple(PLACES)) -> list[Place]:
    """Those of `places` whose engine is installed here."""
    return [place for place in places if find_spec(engine_of(place.strategy)) is not None]


@dataclass(frozen=True)
class Case:
    """The first value of each field is the simplest, and isn't printed."""

    seed: int = 0
    parts: tuple[str, ...] = ()  # of the model
    exact: bool = False  # a linear model on powers of two: its gradients are known to the last bit
    loader: str = "map"  # map, dict, images, sampler, hidden, batches, stream, ready, graph
    size: int = 12  # samples; of `batches` and the like, batches
    batch: int = 2  # per rank
    shuffle: bool = False
    drop_last: bool = False
    pair: str = ""  # a second loader: "then" after the first, "zip" beside it
    epochs: int = 1
    accumulate: int = 1
    weighted: bool = False  # the loss is a mean over tokens, and backward gets their number
    optimizer: str = "sgd"  # sgd, momentum, adamw, adagrad
    groups: str = ""  # of the optimizer: one, "two", or one and an "empty" one
    second: str = ""  # a second optimizer: of the same model's other "half", or of a second "model"
    clear: str = "last"  # zero_grad after the step, or "first", before its own backward
    scheduler: str = ""  # "step" or "epoch": what it counts
    clip: float | None = None
    norm: float = 2.0
    precision: str = "fp32"
    aside: str = ""  # "forward" or "unwrapped", both without gradients, or "evaluate"
    at: str = "after"  # the step, "before" the forward, or "between" backward and clipping
    validate: bool = False  # an evaluation at the end of each epoch
    # A checkpoint, from which a new run goes on: "inside" a pass, "asked" for before the step,
    # "between" two loaders, at the "end" of an epoch.
    save: str = ""
    save_at: int = 0  # number of the micro-batch or of the epoch
    gather: bool = True  # fsdp: reshard_after_forward
    sharded: str = "fp32"  # fsdp: param_dtype
    value: str = ""  # of values.PROBES: what is reduced or gathered beside

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(shown)})"

    @property
    def dimensions(self) -> set[str]:
        """What this case tries, by names that the summary counts."""
        named = [
            *self.parts,
            f"loader {self.loader}",
            f"precision {self.precision}",
            *(
                f"{name} {getattr(self, name)}"
                for name in ("pair", "second", "scheduler", "groups")
                if getattr(self, name)
            ),
            *([f"{self.aside} {self.at}"] if self.aside else []),
            *([f"resume {self.save}"] if self.save else []),
            *([f"clip {self.norm:g}"] if self.clip else []),
            *([f"values of {self.value.split()[0]}"] if self.value else []),
            f"optimizer {self.optimizer}",
        ]
        flags = {"accumulate": self.accumulate > 1, "weighted": self.weighted, "validate": self.validate}
        flags |= {
            "exact": self.exact,
            "uneven": bool(self.size % (self.batch * 12)),
            "clear first": self.clear != "last",
        }
        flags |= {"drop_last": self.drop_last, "shuffle": self.shuffle}
        flags |= {"fsdp keeps weights gathered": not self.gather, "fsdp in bf16": self.sharded != "fp32"}
        return {*named, *(name for name, there in flags.items() if there)}


def sound(case: Case) -> Case:
    """The nearest case whose right result is defined; the rest of a drawn case stays."""
    if case.sharded != "fp32" or case.exact:  # gradients of a bit each
        case = replace(
            case, exact=True, parts=(), loader="map", size=24, batch=1, drop_last=False, weighted=False, second="",
            optimizer="sgd", groups="", scheduler="", clip=None, precision="fp32", pair="",
            accumulate=min(case.accumulate, 4) if case.accumulate != 3 else 2,
        )  # fmt: skip
    if case.pair == "zip":  # plain iteration has no repeated batches: every rank has data in each
        case = replace(case, loader="map", size=12 * case.batch, drop_last=False, accumulate=1, weighted=False)
    if case.second == "model":
        case = replace(case, pair="")
    if case.save == "between" and case.pair != "then":
        case = replace(case, save="inside")
    if case.loader not in ("map", "dict", "images"):
        case = replace(case, shuffle=False, drop_last=False)
    if case.loader in UNITS:
        case = replace(case, size=min(case.size, 7))
    if case.save in ("between", "end"):
        case = replace(case, save_at=case.save_at % case.epochs)
    if not case.save:
        case = replace(case, save_at=0)
    return case if case.aside else replace(case, at="after")


def _subset(names: tuple[str, ...]) -> Any:
    return st.lists(st.sampled_from(names), max_size=3, unique=True).map(lambda chosen: tuple(sorted(chosen)))


def _often(usual: Any, *others: Any) -> Any:
    """Half of the time the usual."""
    return st.one_of(st.just(usual), st.sampled_from((usual, *others)))


def cases(without: tuple[str, ...] = ()) -> Any:
    """Hypothesis's strategy of sound cases, apart from those that try a dimension of `without`."""
    drawn = st.builds(
        Case,
        seed=st.integers(0, 3),
        parts=_subset(PARTS),
        exact=st.sampled_from((False,) * 7 + (True,)),
        loader=_often("map", "dict", "images", "sampler", "hidden", "batches", "stream", "ready", "graph"),
        size=st.integers(4, 13),
        batch=st.integers(1, 3),
        shuffle=st.booleans(),
        drop_last=_often(False, True),
        pair=_often("", "then", "zip"),
        epochs=st.integers(1, 2),
        accumulate=st.integers(1, 4),
        weighted=st.booleans(),
        optimizer=st.sampled_from(("sgd", "momentum", "adamw", "adagrad")),
        groups=_often("", "two", "empty"),
        second=st.sampled_from(("", "model", "half")),
        clear=st.sampled_from(("last", "first")),
        scheduler=st.sampled_from(("", "step", "epoch")),
        clip=st.sampled_from((None, 0.05, 0.5)),
        norm=st.sampled_from((2.0, float("inf"))),
        precision=_often("fp32", "bf16", "fp16"),
        aside=_often("", "forward", "unwrapped", "evaluate"),
        at=_often("between", "after", "before"),
        validate=st.booleans(),
        save=_often("", "inside", "asked", "between", "end"),
        save_at=st.integers(0, 3),
        gather=_often(True, False),
        sharded=st.sampled_from(("fp32",) * 7 + ("bf16",)),
        value=_often("", *values.PROBES),
    ).map(sound)
    return drawn.filter(lambda case: not case.dimensions & set(without)) if without else drawn
