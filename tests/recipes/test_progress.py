"""How far a study is."""

from recipes.common.progress import Bar, bar


def test_runs_that_were_stored_say_nothing_of_the_time_that_is_left():
    told = []
    bar = Bar(lambda *what: told.append(what), 3)
    bar.done()  # stored: it began nothing
    bar.begin("dense, seed 1", 10)
    bar.tick(10)
    bar.begin("dense, seed 1: test")
    bar.done()
    assert [each for each in told if each[0] == "runs"] == [("runs", 0, 3), ("runs", 0, 2), ("runs", 1, 2)]


def test_into_a_file_a_study_writes_a_line_now_and_then(monkeypatch, capsys):
    clock = iter([0.0, 30.0, 61.0, 62.0, 200.0])
    monkeypatch.setattr("coterie.progress.time.monotonic", lambda: next(clock))
    with bar(2) as shown:
        shown.begin("dense, seed 0", 250)
        shown.tick(100)
        shown.tick(1)
        shown.done()
        shown.begin("smyrf, seed 0", 250)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "0 of 2 runs are done; dense, seed 0 100/250, 31 s",
        "1 of 2 runs are done; smyrf, seed 0 0/250, 0 s",
    ]
