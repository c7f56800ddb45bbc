"""How far a study is."""

from recipes.common.progress import Bar


def test_runs_that_were_stored_say_nothing_of_the_time_that_is_left():
    told = []
    bar = Bar(lambda *what: told.append(what), 3)
    bar.done()  # stored: it began nothing
    bar.begin("dense, seed 1", 10)
    bar.tick(10)
    bar.begin("dense, seed 1: test")
    bar.done()
    assert [each for each in told if each[0] == "runs"] == [("runs", 0, 3), ("runs", 0, 2), ("runs", 1, 2)]
