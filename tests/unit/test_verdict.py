import json
import signal

import pytest

from phalanx.schedulers import failure as verdict

REPORT = """Traceback (most recent call last):
  File "run.py", line 1, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
phalanx.worker FAILED
------------------------------------------------------------
Failures:
{others}
------------------------------------------------------------
Root Cause (first observed failure):
{root}
============================================================
"""


def entry(rank, code, host="node7"):
    return (
        f"[{rank}]:\n  time      : 2026-01-02_03:04:05\n  host      : {host}\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 4711)\n  error_file: <N/A>\n"
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )


def report(*entries):
    return REPORT.format(others="\n".join(entries[:-1]) or "  <NO_OTHER_FAILURES>", root=entries[-1])


def error_file(folder, rank, time, exception="ValueError: bad", code=1, name=None):
    path = folder / "errors" / f"{name or rank}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"v": 1, "rank": rank, "host": "node3", "time": time, "exception": exception, "exit_code": code})
    )


def find(folder, stderr="", returncode=1, launcher="torchrun"):
    return verdict.find(folder, 100.0, returncode, stderr, "here", launcher)


def test_the_first_to_fail_is_the_culprit_whatever_its_rank(tmp_path):
    error_file(tmp_path, 0, 103.5, "RuntimeError: Connection closed by peer")
    error_file(tmp_path, 3, 103.1, "ValueError: bad", 7)
    error_file(tmp_path, 2, 103.4, "RuntimeError: Connection closed by peer")
    culprit = find(tmp_path, report(entry(0, 1), entry(3, 7)))
    assert (culprit.rank, culprit.host, culprit.exit_code) == (3, "node3", 7)
    assert "ValueError: bad" in culprit.what


def test_errors_of_an_earlier_attempt_do_not_count(tmp_path):
    error_file(tmp_path, 0, 99.0)
    assert find(tmp_path) is None
    error_file(tmp_path, 1, 100.5)
    assert find(tmp_path).rank == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', "null"])
def test_a_broken_error_file_is_passed_over(tmp_path, text):
    error_file(tmp_path, 2, 101.0)
    (tmp_path / "errors/0.json").write_text(text)
    assert find(tmp_path).rank == 2


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS"])
def test_a_killed_rank_is_the_culprit_though_others_had_time_to_complain(tmp_path, name):
    error_file(tmp_path, 0, 103.5, "RuntimeError: Connection closed by peer")
    number = getattr(signal, name)
    culprit = find(tmp_path, report(entry(1, -number), entry(0, 1)))
    assert (culprit.rank, culprit.host, culprit.exit_code) == (1, "node7", 128 + number)
    assert name in culprit.what


def test_an_abort_because_another_failed_does_not_hide_that_one(tmp_path):
    error_file(tmp_path, 1, 103.5)
    assert find(tmp_path, report(entry(1, 1), entry(0, -signal.SIGABRT))).rank == 1


@pytest.mark.parametrize(("code", "exit_code"), [(9, 9), (-signal.SIGABRT, 134)])
def test_a_rank_that_left_without_words_is_blamed_for_broken_connections(tmp_path, code, exit_code):
    error_file(tmp_path, 0, 103.5, "RuntimeError: [gloo/transport/tcp/pair.cc] Read error: Connection reset by peer")
    culprit = find(tmp_path, report(entry(0, 1), entry(2, -signal.SIGTERM), entry(1, code)))
    assert (culprit.rank, culprit.exit_code) == (1, exit_code)


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection reset by peer"
HOROVOD = "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV"])
@pytest.mark.parametrize("words", [GLOO, HOROVOD])
def test_a_signal_is_the_cause_though_torchrun_saw_another_rank_first(tmp_path, name, words):
    """It looks ten times a second, and of two that ended in between it calls the lower one the root cause. It ends
    nobody then, and says so of nobody."""
    error_file(tmp_path, 0, 103.5, words)
    number = getattr(signal, name)
    culprit = find(tmp_path, report(entry(1, -number), entry(0, 1)))
    assert (culprit.rank, culprit.exit_code) == (1, 128 + number)


def test_a_sigterm_that_may_be_the_agents_is_nobodys_fault(tmp_path, monkeypatch):
    """With LOGLEVEL=ERROR it doesn't say whom it ended."""
    error_file(tmp_path, 0, 103.5, GLOO)
    monkeypatch.setenv("LOGLEVEL", "error")
    assert find(tmp_path, report(entry(1, -signal.SIGTERM), entry(0, 1))).rank == 0


def test_a_rank_that_torchrun_had_to_kill_is_not_to_blame(tmp_path):
    """It sends SIGKILL 30 s after SIGTERM to ranks that are still there."""
    error_file(tmp_path, 0, 103.5, "ValueError: bad")
    ended = "W1128 05:06:03 463 api.py:1028] Sending process 4799 closing signal SIGTERM\n"
    killed = entry(1, -signal.SIGKILL).replace("4711", "4799")
    assert find(tmp_path, ended + report(killed, entry(0, 1))).rank == 0


DEEPSPEED = "[2026-11-29 08:03:02,746] [ERROR] [launch.py:259:sigkill_handler] ['python'] exits with return code = {}\n"
HOROVODRUN = "RuntimeError: Horovod detected that one or more processes exited\nProcess name: {}\nExit code: {}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("words", [GLOO, HOROVOD])
def test_engines_launchers_too_tell_of_the_signal_and_of_the_rank_that_left_no_words(tmp_path, number, words):
    for rank in (0, 2):
        error_file(tmp_path, rank, 103.5 + rank, words)
    said = {"deepspeed": DEEPSPEED.format(-number), "horovodrun": HOROVODRUN.format(1, 128 + number)}
    for launcher, text in said.items():
        culprit = verdict.find(tmp_path, 100.0, 1, text, "here", launcher, 3)
        assert (culprit.rank, culprit.exit_code) == (1, 128 + number), launcher


def test_a_code_of_one_that_lost_its_connection_is_not_the_silent_ranks(tmp_path):
    """DeepSpeed's launcher looks once a second, and takes any of those that ended in between."""
    error_file(tmp_path, 0, 103.5, GLOO)
    culprit = verdict.find(tmp_path, 100.0, 1, DEEPSPEED.format(1), "here", "deepspeed", 2)
    assert (culprit.rank, culprit.what) == (1, "left without a word")
    error_file(tmp_path, 0, 103.5, "ConnectionRefusedError: [Errno 111] Connection refused")  # by a server of its own
    for launcher, text in (("deepspeed", DEEPSPEED.format(1)), ("torchrun", report(entry(1, -15), entry(0, 1)))):
        ended = "Sending process 4711 closing signal SIGTERM\n" if launcher == "torchrun" else ""
        culprit = verdict.find(tmp_path, 100.0, 1, ended + text, "here", launcher, 2)
        assert culprit.rank == 0


def test_without_words_of_a_rank_the_launchers_root_cause_counts(tmp_path):
    culprit = find(tmp_path, "noise\n" + report(entry(0, 5), entry(2, 9)))
    assert (culprit.rank, culprit.exit_code) == (2, 9)


def test_a_launcher_on_loopback_means_this_host(tmp_path):
    assert find(tmp_path, report(entry(1, -9, "localhost"))).host == "here"


def test_only_the_last_report_counts(tmp_path):
    assert find(tmp_path, report(entry(0, 5)) + report(entry(1, 6))).rank == 1


def test_a_rank_that_failed_before_it_knew_its_rank_is_named_by_its_host(tmp_path):
    error_file(tmp_path, None, 101.0, name="node3-17")
    culprit = find(tmp_path)
    assert (culprit.who, culprit.host) == ("a rank", "node3")


@pytest.mark.parametrize(
    ("returncode", "code", "words"), [(7, 7, "exit code 7"), (-9, 137, "SIGKILL"), (-15, 143, "SIGTERM")]
)
def test_a_single_process_is_its_own_culprit(tmp_path, returncode, code, words):
    culprit = find(tmp_path, returncode=returncode, launcher="python")
    assert (culprit.rank, culprit.host, culprit.exit_code) == (0, "here", code)
    assert words in culprit.what


def test_a_port_that_torchruns_store_could_not_have_is_named():
    from phalanx.schedulers.failure import _PORT_TAKEN

    said = (  # torch 2.13, two agents of which the first could not listen
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29611, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
    )
    assert _PORT_TAKEN.search(said)[1] == "29611"
