"""Cases that were wrong once, in their simplest form: compared again in every run of the tests."""

from tests.search.cases import Case

INF = float("inf")

EXAMPLES = [
    # A forward without gradients between backward and step left FSDP's weights gathered.
    Case(aside="forward", at="between", clip=0.05),
    Case(aside="unwrapped", at="between", weighted=True, gather=False),
    Case(aside="evaluate", at="between", clip=0.5, accumulate=2),
    # So did an evaluation before a checkpoint, and before a resume.
    Case(validate=True, save="end", epochs=2, gather=False),
    Case(validate=True, save="inside", epochs=2, optimizer="adamw", scheduler="step"),
    # FSDP's gradients were reduced, and added up, in the type of its parameters.
    Case(exact=True, size=24, batch=1, sharded="bf16"),
    Case(exact=True, size=24, batch=1, sharded="bf16", accumulate=4),
    # A rank's empty shard has no infinity norm.
    Case(clip=0.5, norm=INF),
    # What a batch counts, where its first tensor doesn't tell.
    Case(loader="graph", accumulate=4),
    Case(loader="graph", accumulate=4, weighted=True, validate=True),
    # One rank's doubt about a batch's number of samples was an error on that rank only.
    Case(seed=3, loader="graph", size=7),
    # A rank without data got images without channels in an evaluation.
    Case(loader="images", validate=True, parts=("buffers",)),
    # Samplers with generators that nobody sees.
    Case(loader="hidden", epochs=2),
    Case(loader="hidden", epochs=2, save="inside", save_at=2),
    # A resume with two loaders an epoch.
    Case(pair="then", epochs=2, save="inside", save_at=8),
    Case(pair="then", epochs=2, save="between"),
    Case(pair="zip", epochs=2, save="inside", save_at=1),
    # Two optimizers that accumulate: each with zero_grad before its own backward, and with weights.
    Case(second="model", accumulate=2, clear="first"),
    Case(second="model", accumulate=3, weighted=True),
    Case(second="half", accumulate=2, weighted=True, clear="first"),
    # Values.
    Case(value="reduce keys mean"),
    Case(value="reduce big sum"),
    Case(value="reduce bool sum"),
    Case(value="reduce ints sum weight"),
    Case(value="reduce complex mean"),
    Case(value="reduce halves mean large"),
    Case(value="gather flat"),
    Case(value="gather dtypes"),
    # Models that some engine couldn't take.
    Case(parts=("double",)),
    Case(parts=("double",), clip=0.05, norm=float("inf"), size=8),
    Case(parts=("scalar",)),
    Case(parts=("tied blocks",)),
    Case(groups="empty", save="end", epochs=2, optimizer="adamw"),
    Case(optimizer="adagrad"),
    Case(precision="fp16"),
]
# Never wrong: what else every run is to try, everywhere.
EVERYWHERE = [
    Case(parts=("blocks", "shared", "tied"), loader="dict", optimizer="momentum", groups="two", scheduler="epoch"),
    Case(parts=("frozen",), loader="sampler", accumulate=2, value="broadcast nested", save="asked"),
    Case(loader="ready", size=6, precision="bf16", epochs=2),
    Case(loader="graph", size=6, weighted=True, accumulate=2),
    Case(loader="batches", size=5, parts=("buffers",), second="half", clear="first"),
    Case(loader="stream", size=7, accumulate=3, parts=("conditional",)),
]
