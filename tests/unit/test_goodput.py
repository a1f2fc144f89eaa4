"""Goodput adds up: whatever starts, kills, stops and clocks a run sees, each second is counted once, and steps that were trained
twice count once.

`Story` is a run as it was: true times of all that happened, and beside them the notes that its ranks left, by their own clocks.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUME
from framework.track.goodput import Account, Accountant, Event, Note, Segment, TimePart, add_up, read_notes

NEAR = 1e-4  # wall clocks of 1e9 s are known to 1e-7


@dataclass
class Story:
    """true: seconds of each part. steps: how long each step took that counts, by its number. skews: of the clocks of starts."""

    random: random.Random
    skew_s: float = 0.0
    notes_every: int = 1
    now: float = 1e9
    began: float = 1e9
    true: dict[TimePart, float] = field(default_factory=lambda: dict.fromkeys(TimePart, 0.0))
    steps: dict[int, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    skews: list[float] = field(default_factory=list)
    recovers: bool = False
    start: int = 0

    def spend(self, *parts: TimePart, most: float = 100.0) -> float:
        seconds = self.random.choice((0.0, self.random.uniform(0.0, most)))
        self.now += seconds
        self.true[parts[0]] += seconds
        return seconds

    def begin(self, resume: int, in_job: bool, queued: bool, dies: bool = False) -> None:
        """Off or dead for a while, perhaps a queue, then start-up and the loop from step `resume`. dies: in start-up."""
        job = {}
        start_up = TimePart.RECOVERY if self.recovers else TimePart.START_UP
        if self.start:
            self.spend(TimePart.RECOVERY if self.recovers else TimePart.OFF, most=1e4)
        self.skews.append(self.random.uniform(-self.skew_s, self.skew_s))
        if in_job:
            job["submitted_s"] = self.clock()
            if queued:
                self.spend(TimePart.QUEUE, most=1e4)
            job["started_s"] = self.clock()
            self.spend(start_up)
        self.start += 1
        self.parts = dict.fromkeys(TimePart, 0.0)
        self.begun = self.now
        start_up = TimePart.RECOVERY if dies else start_up
        self.parts[TimePart.START_UP] += self.spend(start_up)
        self.note(Event.BEGIN, None, ranks=2, **job)
        self.parts[TimePart.START_UP] += self.spend(start_up)
        if dies:
            return
        for step in [each for each in self.steps if each > resume]:
            lost = self.steps.pop(step)
            self.true[TimePart.STEP] -= lost
            self.true[TimePart.LOST] += lost
        self.done = resume
        self.note(Event.GO, resume)

    def clock(self) -> float:
        return self.now + self.skews[-1]

    def note(self, event, step, **more) -> None:
        elapsed_s = self.now - self.begun
        parts = {} if event is Event.BEGIN else dict(self.parts)
        self.notes.append(Note(event, self.start, self.clock(), elapsed_s, step, parts, **more))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            seconds = self.random.uniform(0.1, 10.0)
            self.now += seconds
            self.done += 1
            self.steps[self.done] = seconds
            self.true[TimePart.STEP] += seconds
            self.parts[TimePart.STEP] += seconds
            if self.done % self.notes_every == 0:
                self.note(Event.STEP, self.done)

    def end(self, code: int | None, seen: bool) -> None:
        """With an exit code of its own, or killed (None). seen: a launcher notes that they are gone."""
        is_asked = code in (EXIT_DONE, EXIT_RESUME)
        if code is not None:
            self.parts[TimePart.CLOSE] += self.spend(TimePart.CLOSE)
            self.note(Event.END, self.done, code=code)
        if seen:
            self.spend(TimePart.CLOSE if is_asked else TimePart.RECOVERY)
            self.notes.append(Note(Event.GONE, 0, self.clock(), code=137 if code is None else code))
        self.recovers = not is_asked

    @property
    def wall_s(self) -> float:
        return self.now - self.began


def tell(seed: int, skew_s: float = 0.0, notes_every: int = 1, num_starts: int = 6) -> Story:
    """A story with so many starts. Before the last of them, ranks end in all ways and resume where they may."""
    chance = random.Random(seed)
    story = Story(chance, skew_s, notes_every)
    resume = 0
    for index in range(num_starts):
        while index < num_starts - 1 and chance.random() < 0.2:
            story.begin(resume, in_job=chance.random() < 0.5, queued=chance.random() < 0.8, dies=True)
            story.end(None, seen=chance.random() < 0.5)
        story.begin(resume, in_job=chance.random() < 0.5, queued=chance.random() < 0.8)
        story.train(chance.randrange(0, 30))
        code = chance.choice((None, None, EXIT_FAILED, EXIT_RESUME)) if index < num_starts - 1 else EXIT_DONE
        story.end(code, seen=chance.random() < 0.5)
        resume = story.done if code == EXIT_RESUME else chance.randrange(0, story.done + 1)
    return story


def check_sums(account: Account) -> None:
    assert min(account.seconds.values()) >= 0
    assert all(min(row.values()) >= -NEAR for row in account.rows)
    assert account.wall_s == pytest.approx(sum(sum(row.values()) for row in account.rows))
    if account.on_s:
        assert sum(account.shares.values()) == pytest.approx(1.0)


def check_truth(story: Story, accountant: Accountant) -> None:
    for note in story.notes:
        accountant.add(note)
    account = accountant.account()
    check_sums(account)
    assert account.wall_s == pytest.approx(story.wall_s, rel=1e-9, abs=NEAR)
    assert account.seconds == pytest.approx(story.true, rel=1e-9, abs=1e-3)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9))
def test_every_second_is_where_it_was_spent(seed):
    check_truth(tell(seed), Accountant())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.floats(0.0, 1e5), st.integers(1, 40))
def test_clocks_that_differ_make_no_time_negative_and_move_only_what_lies_between_starts(seed, skew_s, notes_every):
    story = tell(seed, skew_s, notes_every)
    account = add_up(story.notes)
    check_sums(account)
    off_s = sum(abs(one - other) for one, other in pairwise(story.skews))
    assert abs(account.wall_s - story.wall_s) <= off_s + NEAR
    # No clock but the start's own measures steps. Those behind the last note of a start that is killed nobody knows.
    known, true = (each[TimePart.STEP] + each[TimePart.LOST] for each in (account.seconds, story.true))
    assert known <= true + 1e-3
    assert known == pytest.approx(true) or notes_every > 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 9))
def test_steps_that_no_note_has_seen_change_no_sum(seed, notes_every):
    story = tell(seed, notes_every=notes_every)
    notes = [replace(note, step_s=5.0) if note.event is Event.STEP else note for note in story.notes]
    account = add_up(notes)
    check_sums(account)
    assert account.wall_s == pytest.approx(story.wall_s, rel=1e-9, abs=NEAR)


def killed_and_resumed(**last) -> list[Note]:
    """Ten steps of 2 s, killed; noticed 5 s later, begun again 10 s later on a machine whose clock is 100 s behind."""
    parts = {TimePart.START_UP: 3.0, TimePart.STEP: 20.0}
    return [
        Note(Event.BEGIN, 1, 1000.0, ranks=4),
        Note(Event.GO, 1, 1003.0, 3.0, 0, {TimePart.START_UP: 3.0}),
        Note(Event.STEP, 1, 1023.0, 23.0, 10, parts, 2.0),
        Note(Event.GONE, 0, 1028.0, code=137),
        Note(Event.BEGIN, 2, 1038.0, ranks=2, **last),
        Note(Event.GO, 2, 1041.0, 3.0, 4, {TimePart.START_UP: 3.0}),
        Note(Event.STEP, 2, 1047.0, 9.0, 7, {TimePart.START_UP: 3.0, TimePart.STEP: 6.0}, 2.0),
    ]


def test_a_killed_start_has_lost_what_lay_behind_the_checkpoint_and_the_rest_is_recovery():
    account = add_up(killed_and_resumed())
    spent = {part: seconds for part, seconds in account.seconds.items() if seconds}
    assert spent == {
        TimePart.STEP: 8.0 + 6.0, TimePart.LOST: 12.0, TimePart.START_UP: 3.0, TimePart.RECOVERY: 5.0 + 10.0 + 3.0
    }  # fmt: skip
    assert account.rank_seconds[TimePart.LOST] == 48.0
    assert account.rank_seconds[TimePart.RECOVERY] == 5 * 4 + 13 * 2
    assert account.ettr == pytest.approx(14 / 47)


def test_a_requeue_waits_in_the_queue_and_pays_for_nothing_meanwhile():
    account = add_up(killed_and_resumed(submitted_s=1030.0, started_s=1037.0))
    assert account.seconds[TimePart.QUEUE] == 7.0
    assert account.seconds[TimePart.RECOVERY] == 5.0 + 2.0 + 1.0 + 3.0
    assert account.rank_seconds[TimePart.QUEUE] == 0.0


def test_a_start_in_the_same_job_has_not_queued_again():
    account = add_up(killed_and_resumed(submitted_s=900.0, started_s=999.0))
    assert account.seconds[TimePart.QUEUE] == 0.0
    assert account.seconds[TimePart.RECOVERY] == 18.0


def test_a_stop_by_the_user_is_off_until_somebody_goes_on():
    notes = [replace(note, code=EXIT_RESUME) if note.event is Event.GONE else note for note in killed_and_resumed()]
    notes[-2] = replace(notes[-2], step=10)
    account = add_up([*notes[:-1], replace(notes[-1], step=13)])
    assert account.seconds[TimePart.OFF] == 10.0
    assert account.seconds[TimePart.CLOSE] == 5.0
    assert account.seconds[TimePart.LOST] == account.seconds[TimePart.RECOVERY] == 0.0
    assert TimePart.OFF not in account.shares
    assert account.on_s == account.wall_s - 10.0


def test_a_launcher_that_prepares_data_is_start_up():
    launch = Note(Event.LAUNCH, 0, 990.0, 600.0)
    account = add_up([launch, *killed_and_resumed()[:3]])
    assert account.seconds[TimePart.START_UP] == 610.0 + 3.0


def test_steps_that_no_note_has_seen_count_once_their_checkpoint_is_resumed():
    """It died 12 s after its last note, in which it had saved three steps more: 6 s of these were steps."""
    notes = killed_and_resumed()
    notes[-2:] = [replace(notes[-2], step=13), replace(notes[-1], step=16)]
    account = add_up(notes)
    assert account.seconds[TimePart.STEP] == 20.0 + 6.0 + 6.0
    assert account.seconds[TimePart.RECOVERY] == 18.0 - 6.0
    assert account.seconds[TimePart.LOST] == 0.0


def test_a_loop_that_goes_back_has_lost_the_steps_behind():
    parts = {TimePart.START_UP: 3.0, TimePart.STEP: 20.0}
    back = [
        Note(Event.GO, 1, 1023.0, 23.0, 6, parts),
        Note(Event.STEP, 1, 1027.0, 27.0, 8, {**parts, TimePart.STEP: 24.0}),
    ]
    account = add_up([*killed_and_resumed()[:3], *back])
    assert (account.seconds[TimePart.LOST], account.seconds[TimePart.STEP]) == (8.0, 16.0)


def test_ranks_that_outlive_their_successor_are_not_counted():
    notes = killed_and_resumed()
    thawed = Note(Event.STEP, 1, 2000.0, 1000.0, 400, {TimePart.STEP: 990.0})
    assert add_up([*notes, thawed]) == add_up(notes)


class ForgetsLostWork(Accountant):
    def _lose(self, lost: Segment, step: int) -> None:
        pass


class CountsBackwards(Accountant):
    def _pass(self, until_s: float) -> float:
        seconds, self._seen_s = until_s - self._seen_s, until_s
        return seconds


class LosesAll(Accountant):
    def _lose(self, lost: Segment, step: int) -> None:
        super()._lose(lost, 0)


class TakesDeathForAStop(Accountant):
    def _leave(self, unix_s: float, code: int | None) -> None:
        super()._leave(unix_s, EXIT_DONE)


@pytest.mark.parametrize("broken", [ForgetsLostWork, CountsBackwards, LosesAll, TakesDeathForAStop])
def test_sabotage_of_the_account_shows(broken):
    """Each of these breaks a check that the whole accountant passes on the same stories."""
    check_all(Accountant)
    with pytest.raises(AssertionError):
        check_all(broken)


def check_all(kind: type[Accountant]) -> None:
    for seed in range(20):
        check_truth(tell(seed), kind())
        skewed, between = kind(), kind()
        for note in tell(seed, 1e4).notes:
            skewed.add(note)
        check_sums(skewed.account())
        for note in killed_and_resumed():
            between.add(note)
        assert between.account().seconds[TimePart.LOST] == 12.0


FIRST = [
    Note(Event.BEGIN, 1, 5.0, 5.0),
    Note(Event.GO, 1, 20.0, 20.0, 0, {"start_up": 20.0}),
    Note(Event.STEP, 1, 120.0, 120.0, 100, {"start_up": 20.0, "step": 100.0}, step_s=1.0),
]


def test_steps_count_once_where_a_start_ends_between_them_that_has_not_come_to_its_loop():
    dead = [Note(Event.BEGIN, 2, 135.0, 3.0), Note(Event.END, 2, 150.0, 18.0, 0, {"start_up": 18.0}, code=EXIT_FAILED)]
    third = [Note(Event.BEGIN, 3, 165.0, 3.0), Note(Event.GO, 3, 240.0, 78.0, 100, {"start_up": 78.0})]
    found = add_up([*FIRST, *dead, *third]).seconds
    assert found[TimePart.STEP] == 100.0
    assert found[TimePart.RECOVERY] == 120.0


def test_a_launch_without_ranks_leaves_the_time_before_it_off():
    stopped = Note(Event.GONE, 0, 121.0, code=EXIT_RESUME)
    failed = [Note(Event.LAUNCH, 0, 10_000.0), Note(Event.GONE, 0, 10_010.0, code=EXIT_FAILED)]
    found = add_up([*FIRST, stopped, *failed, Note(Event.BEGIN, 2, 10_100.0)]).seconds
    assert (found[TimePart.OFF], found[TimePart.CLOSE], found[TimePart.RECOVERY]) == (9_879.0, 1.0, 100.0)


@pytest.mark.parametrize("fields", ['"parts": [1]', '"parts": {"step": "a"}', '"elapsed_s": "x"', '"code": null'])
def test_lines_that_are_no_notes_are_left_out(tmp_path, fields):
    path = tmp_path / "goodput.jsonl"
    path.write_text(
        f'{{"event": "begin", "start": 1, "unix_s": 5, {fields}}}\n{{"event": "step", "start": 0, "unix_s": 6}}\n'
    )
    assert add_up(read_notes(path)).rows == ()
