"""Several processes add to a store, delete from it, compact and tune it at once, and are killed at random: every
acknowledged addition is there, no acknowledged deletion returns, and a change that was cut off happened wholly or not.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import store_crowd
from random_stores import DEFAULTS, spec
from store_history import INDEX, check_holds, entries_of

from memlm.index.store.datastore import Datastore
from memlm.index.store.writer import StoreWriter

CHANGE_S = 60.0


class Hand:
    """One process that changes the store; killed, it is started again."""

    def __init__(self, path: Path) -> None:
        self.path, self.order = path, ""
        self._start()

    def _start(self) -> None:
        command = [sys.executable, store_crowd.__file__, str(self.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, what: str) -> None:
        assert self._process.stdin is not None
        self.order = what
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()

    def answer(self, wait_s: float) -> str | None:
        """What it says of the last change; None where it is still at it."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], wait_s)[0]:
            return None
        reply = self._process.stdout.readline().strip()
        assert reply, f"{self.order} ended the process"
        return reply

    def kill(self) -> str | None:
        """Ends it at once; what it had said before, if anything."""
        reply = self.answer(0)
        self.stop()
        self._start()
        return reply

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Crowd:
    """What the store must hold: documents that must be there, and those that may be, as their change was cut off."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        with StoreWriter.create(path, spec(INDEX)) as writer:
            writer.begin_document("first")
            writer.append(*entries_of("first", 1))
            writer.commit(defaults=DEFAULTS).close()
        self.sure: dict[str, int] = {"first": 1}
        self.unsure: dict[str, tuple[int | None, ...]] = {}
        self.next, self.unfinished, self.done = 0, "", 0
        self.hands = {name: Hand(path) for name in ("writer", "deleter", "compacter", "tuner")}

    def wanted(self, name: str) -> str | None:
        """The next change of a hand."""
        if name == "writer":
            if self.unfinished:  # the same again, as an interrupted addition is gone on with
                return self.unfinished
            if self.rng.random() < 0.3 and (old := [n for n in range(self.next) if self.holds(n)]):
                return f"replace {self.rng.choice(old)}"
            return f"add {self.next}"
        if name == "deleter":
            present = sorted(each for each in self.sure if each != "first" and each not in self.busy())
            if not present or len(present) < 4:
                return None
            return "delete " + " ".join(self.rng.sample(present, self.rng.randint(1, 2)))
        return "compact" if name == "compacter" else f"tune {self.rng.randint(1, 64)}"

    def holds(self, number: int) -> bool:
        return all(name in self.sure for name in store_crowd.batch(number))

    def busy(self) -> set[str]:
        """Documents that the writer is at."""
        order = self.hands["writer"].order or self.unfinished
        return set(store_crowd.batch(int(order.split()[1]))) if order else set()

    def settle(self, name: str, reply: str | None) -> None:
        """Takes in how a change ended: done, refused, or cut off."""
        hand = self.hands[name]
        what, *words = hand.order.split()
        hand.order = ""
        self.done += reply == "done"
        if what in ("add", "replace"):
            names, version = store_crowd.batch(int(words[0])), 2 if what == "replace" else 1
            if reply == "done":
                self.sure |= dict.fromkeys(names, version)
                for each in names:
                    self.unsure.pop(each, None)
                self.unfinished = ""
            elif reply is None:
                for each in names:
                    before = self.sure.pop(each, None)
                    self.unsure[each] = (*self.unsure.get(each, (before,)), version)
                self.unfinished = f"{what} {words[0]}"
                self.resolve()
            if what == "add" and reply == "done":
                self.next += 1
        elif what == "delete" and reply != "busy Locked":
            assert reply in ("done", None), f"{hand.path} lacks one of {words}: {reply}"
            for each in words:
                before = self.sure.pop(each)
                if reply is None:
                    self.unsure[each] = (before, None)
            self.resolve()

    def resolve(self) -> None:
        """Looks which way changes that were cut off went: from then on that is sure."""
        with Datastore.open(self.path) as store:
            tokens = {
                name: store.snapshot.tokens(name).tolist() for name in self.unsure if store.snapshot.has_document(name)
            }
        for name, versions in list(self.unsure.items()):
            held = [
                version
                for version in versions
                if tokens.get(name) == (None if version is None else entries_of(name, version)[1].tolist())
            ]
            assert held, f"{name} holds none of the versions {versions}"
            del self.unsure[name]
            if held[0] is not None:
                self.sure[name] = held[0]
        if self.unfinished:
            what, number = self.unfinished.split()
            # A replacement by equal documents does not show whether it was committed, so it is done again.
            if what == "add" and all(self.sure.get(name) == 1 for name in store_crowd.batch(int(number))):
                self.unfinished = ""
                self.next += 1

    def run(self, kills: int) -> None:
        try:
            killed, deadline_s = 0, time.monotonic() + 20 * CHANGE_S
            while killed < kills or self.done < 2 * kills or self.next < 3:
                assert time.monotonic() < deadline_s, f"{killed} kills"
                for name, hand in self.hands.items():
                    if not hand.order and (wanted := self.wanted(name)):
                        hand.ask(wanted)
                    if hand.order and (reply := hand.answer(0.01)):
                        self.settle(name, reply)
                if killed < kills and self.rng.random() < 0.06:
                    name = self.rng.choice(sorted(self.hands))
                    if self.hands[name].order:
                        time.sleep(self.rng.uniform(0, 0.05))
                        self.settle(name, self.hands[name].kill())
                        killed += 1
            for name, hand in self.hands.items():
                if hand.order:
                    reply = hand.answer(CHANGE_S)
                    assert reply is not None, f"{hand.order} did not end"
                    self.settle(name, reply)
        finally:
            for hand in self.hands.values():
                hand.stop()


@pytest.mark.crash
@pytest.mark.parametrize(("kills", "seed"), [(8, 0), pytest.param(100, 1, marks=pytest.mark.slow)])
def test_what_is_acknowledged_stands_however_many_change_a_store_and_are_killed(
    tmp_path: Path, kills: int, seed: int
) -> None:
    crowd = Crowd(tmp_path / "s", seed)
    crowd.run(kills)
    assert not crowd.unsure
    with Datastore.open(tmp_path / "s") as store:
        assert store.snapshot.verify() == []
        check_holds(store, crowd.sure)
