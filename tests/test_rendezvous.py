from __future__ import annotations

import pytest

import accel
from accel.rendezvous import rendezvous

NAMES = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_names_get_even_shares_and_only_the_keys_of_a_name_that_goes_move() -> None:
    before = {key: rendezvous(key, NAMES) for key in range(4000)}
    shares = [list(before.values()).count(name) for name in NAMES]
    assert all(850 < share < 1150 for share in shares), shares
    after = {key: rendezvous(key, NAMES[:3]) for key in before}
    assert {key for key in before if after[key] != before[key]} == {key for key in before if before[key] == NAMES[3]}


def test_the_choice_is_the_same_in_every_process_and_in_any_order() -> None:
    assert [rendezvous(key, NAMES) for key in ("user-17", b"user-17", 17, "\ud800")] == ["cuda:2", "cuda:2", "cuda:1", "cuda:3"]
    assert rendezvous("user-17", reversed(NAMES)) == rendezvous("user-17", NAMES)
    assert rendezvous("user-17", []) is None


@pytest.mark.parametrize("key", [None, 1.5, True, (1, 2)])
def test_a_key_that_may_change_between_processes_is_refused(key: object) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="key is"):
        rendezvous(key, NAMES)  # type: ignore[arg-type]
