"""Several attempts as one history, after what a killed or a smaller later attempt leaves."""

from phalanx.records import Epoch, Metric, RecordWriter, Resume, Start, Step, read_records


def attempt(run_dir, rank, number, steps, resumed=None, metrics=(), epochs=()):
    writer = RecordWriter(run_dir, rank, number)
    writer.write(Start(1, 0, 0, "host", 1, "cpu", "ddp", {}))
    if resumed is not None:
        writer.write(Resume(resumed, 0, "path"))
    for step in steps:
        writer.step(step, 0, 0.5, 0.1, 4)
    for step, name in metrics:
        writer.write(Metric(step, 0, {name: 1.0}))
    for epoch, step in epochs:
        writer.write(Epoch(epoch, step, 1.0))
    writer.close()


def steps_of(records, rank=0):
    return [(r.attempt, r.step) for r in records if isinstance(r, Step) and r.rank == rank]


def test_a_step_reads_back_as_it_was_written(tmp_path):
    attempt(tmp_path, 3, 1, [7])
    (step,) = [r for r in read_records(tmp_path) if isinstance(r, Step)]
    assert (step.step, step.epoch, step.seconds, step.wait, step.samples) == (7, 0, 0.5, 0.1, 4)
    assert (step.rank, step.attempt) == (3, 1)


def test_what_came_after_the_resumed_step_is_void(tmp_path):
    attempt(tmp_path, 0, 1, range(1, 8))
    attempt(tmp_path, 0, 2, range(5, 7), resumed=4)
    attempt(tmp_path, 0, 3, [6, 7], resumed=5)
    assert steps_of(read_records(tmp_path)) == [(1, s) for s in (1, 2, 3, 4)] + [(2, 5), (3, 6), (3, 7)]


def test_an_attempt_that_began_anew_voids_all_before_it(tmp_path):
    attempt(tmp_path, 0, 1, [1, 2, 3])
    attempt(tmp_path, 0, 2, [1])
    assert steps_of(read_records(tmp_path)) == [(2, 1)]


def test_an_attempt_that_did_nothing_voids_nothing(tmp_path):
    attempt(tmp_path, 0, 1, [1, 2, 3])
    attempt(tmp_path, 0, 2, [])
    assert steps_of(read_records(tmp_path)) == [(1, 1), (1, 2), (1, 3)]


def test_a_rank_that_a_smaller_attempt_lacks_loses_its_void_steps_too(tmp_path):
    for rank in (0, 1):
        attempt(tmp_path, rank, 1, [1, 2, 3])
    attempt(tmp_path, 0, 2, [2, 3, 4], resumed=1)
    assert steps_of(read_records(tmp_path), rank=1) == [(1, 1)]


def test_an_epoch_or_metric_seen_again_counts_once(tmp_path):
    attempt(tmp_path, 0, 1, [1, 2], metrics=[(2, "loss")], epochs=[(0, 2)])
    attempt(tmp_path, 0, 2, [3], resumed=2, metrics=[(2, "loss"), (2, "accuracy")], epochs=[(0, 2)])
    records = read_records(tmp_path)
    assert [(r.attempt, *r.values) for r in records if isinstance(r, Metric)] == [(2, "loss"), (2, "accuracy")]
    assert [(r.attempt, r.epoch) for r in records if isinstance(r, Epoch)] == [(2, 0)]


def test_a_cut_line_and_a_later_versions_record_are_passed_over(tmp_path):
    attempt(tmp_path, 0, 1, [1])
    with (tmp_path / "records" / "0.1.jsonl").open("a") as file:
        file.write('{"v": 9, "kind": "news", "time": 1.0}\n{"v": 1, "kind": "step", "tim')
    assert steps_of(read_records(tmp_path)) == [(1, 1)]
