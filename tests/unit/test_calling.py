"""When the other end of a call counts as lost."""

from __future__ import annotations

from distnb.cluster.remote.calling import BEAT_S, SILENCE_S, Silence


def test_time_in_which_this_process_stood_still_is_no_silence_of_the_other():
    now = 0.0
    silence = Silence(lambda: now)
    now += 100 * SILENCE_S  # suspended, or without a core
    assert silence.seconds() <= BEAT_S
    for _ in range(int(2 * SILENCE_S / BEAT_S)):
        now += BEAT_S / 2
        heard_for = silence.seconds()
    assert heard_for > SILENCE_S
    silence.over()
    assert silence.seconds() == 0
