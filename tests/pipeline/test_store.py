import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4tool.errors import G4Error
from g4tool.pipeline import cache, journal
from g4tool.pipeline import hashes as hashes_room
from g4tool.pipeline.artifact import Artifact, Decision, Source
from g4tool.pipeline.store import Store
from g4tool.pipeline.work import Work

from .helpers import SIZE, Copies, Pointer, tree


def actions(decisions: list[Decision]) -> list[tuple[str, str, str]]:
    return [(each.stage, each.action, each.reason) for each in decisions]


def test_made_once_then_cached(store: Store, tmp_path: Path) -> None:
    stage = Copies(log=tmp_path / "log")
    heard: list[Decision] = []
    first = store.ensure(stage, on_decision=heard.append)
    second = store.ensure(stage, on_decision=heard.append)
    assert stage.made() == ["unit-0.bin", "unit-1.bin", "unit-2.bin"]
    assert first == second
    assert first.identity == store.identity(stage)
    assert first.path == store.home / "artifacts" / "copies" / first.identity
    assert actions(heard) == [("copies", "make", "never made"), ("copies", "reuse", "cached")]
    assert first.locate("unit-1.bin").stat().st_size == SIZE
    assert sorted(os.listdir(first.path)) == [
        "manifest.json",
        "unit-0.bin",
        "unit-1.bin",
        "unit-2.bin",
    ]
    assert os.listdir(first.path.parent) == [first.identity]


def test_the_manifest_is_the_same_everywhere(tmp_path: Path, given: Path) -> None:
    shutil.copytree(given, tmp_path / "moved")
    made = [
        Store(tmp_path / home).ensure(Copies(inputs=(Source(path),), env={"b": 1, "a": 2}))
        for home, path in (("one", given), ("two", tmp_path / "moved"))
    ]
    assert tree(made[0].path) == tree(made[1].path)
    text = (made[0].path / "manifest.json").read_text()
    assert str(tmp_path) not in text
    manifest = json.loads(text)
    assert list(manifest) == sorted(manifest)
    assert list(manifest["environment"]) == ["a", "b"]
    assert manifest["facts"] == {"results": [{"number": 0}, {"number": 1}, {"number": 2}]}
    assert manifest["files"]["unit-0.bin"]["size"] == SIZE
    assert sorted(manifest["inputs"][0]["files"]) == ["a.txt", "sub/b.txt"]


def test_identity_follows_what_shapes_the_bytes_and_nothing_else(
    store: Store, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Copies(inputs=(Source(given),))
    identity = store.identity(base)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "G4_BLOCK_ROWS"):
        monkeypatch.setenv(variable, "7")
    same = replace(base, log=tmp_path / "log", pause=1.0)
    assert store.identity(same) == identity
    assert Store(tmp_path / "other").identity(same) == identity
    different = [
        replace(base, seed=1),
        replace(base, version=2),
        replace(base, name="copies-2"),
        replace(base, env={"device": "cuda"}),
        replace(base, inputs=()),
        replace(base, inputs=(Source(given, ("a.txt",)),)),
        replace(base, inputs=(Copies(inputs=(Source(given),)),)),
    ]
    identities = {store.identity(each) for each in different}
    assert len(identities | {identity}) == len(different) + 1


def test_a_chain_is_planned_before_anything_exists(store: Store, given: Path) -> None:
    low = Copies(inputs=(Source(given),), name="low")
    high = Copies(inputs=(low, replace(low, seed=1), low), name="high")
    planned = store.plan_all(high)
    assert [(d.stage, d.action) for d in planned] == [
        ("low", "make"),
        ("low", "make"),
        ("high", "make"),
    ]
    heard: list[Decision] = []
    made = store.ensure(high, on_decision=heard.append)
    assert made.identity == planned[-1].identity
    assert [d.action for d in heard] == ["make", "make", "reuse", "make"]
    assert store.plan_all(high) == [Decision("reuse", "high", made.identity, "cached")]


def test_a_reused_artifact_does_not_need_its_inputs(store: Store) -> None:
    low = Copies(name="low")
    high = Copies(inputs=(low,), name="high")
    store.ensure(high)
    shutil.rmtree(store.home / "artifacts" / "low")
    assert actions(store.plan_all(high)) == [("high", "reuse", "cached")]
    store.ensure(high)
    assert not (store.home / "artifacts" / "low").exists()


def test_the_reason_names_what_changed(store: Store, given: Path) -> None:
    store.ensure(Copies(inputs=(Source(given),)))
    assert store.plan(Copies(seed=5, inputs=(Source(given),))).reason == "new: copies.seed 0 -> 5"
    (given / "a.txt").write_bytes(b"changed")
    assert store.plan(Copies(inputs=(Source(given),))).reason == "new: source file a.txt changed"


class Failing(Copies):
    def unit(self, path: Path, number: int) -> dict[str, int]:
        if number == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().unit(path, number)


def test_a_full_disk_is_one_clear_error_and_costs_nothing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(
        G4Error, match=r"is full \(.*bytes free\) while copies was being made: what is finished"
    ):
        store.ensure(Failing(count=4, log=tmp_path / "log"))
    stage = Copies(count=4, log=tmp_path / "log")
    assert actions([store.plan(stage)]) == [("copies", "resume", "2 of 4 files done")]
    resumed = store.ensure(stage)
    assert stage.made() == ["unit-0.bin", "unit-1.bin", "unit-2.bin", "unit-3.bin"]
    assert tree(resumed.path) == tree(Store(tmp_path / "fresh").ensure(Copies(count=4)).path)


def test_a_damaged_artifact_is_made_again(store: Store, tmp_path: Path) -> None:
    stage = Copies(log=tmp_path / "log")
    made = store.ensure(stage)
    before = tree(made.path)
    (made.path / "unit-1.bin").write_bytes(b"short")
    assert store.plan(stage).reason == "made again: its file unit-1.bin has another size"
    (made.path / "unit-1.bin").unlink()
    assert store.plan(stage).reason == "made again: its file unit-1.bin is missing"
    assert tree(store.ensure(stage).path) == before
    (made.path / "manifest.json").write_text("{}")
    assert "manifest.json is no readable manifest (no 'identity')" in store.plan(stage).reason
    assert tree(store.ensure(stage).path) == before
    assert not list((store.home / "trash").iterdir())


def test_an_artifact_that_refers_to_files_outside(
    store: Store, given: Path, tmp_path: Path
) -> None:
    made = store.ensure(Pointer(Source(given)))
    assert made.locate("sub/b.txt") == given / "sub" / "b.txt"
    assert (made.path / "index.txt").read_text() == "a.txt sub/b.txt"
    assert str(tmp_path) not in (made.path / "manifest.json").read_text()
    assert store.plan(Pointer(Source(given))).action == "reuse"

    given.rename(tmp_path / "moved")
    moved = Pointer(Source(tmp_path / "moved"))
    gone = store.plan(moved)
    assert gone.identity == made.identity
    assert gone.reason == f"made again: {given / 'a.txt'}, which it refers to, is gone"
    assert store.ensure(moved).locate("a.txt") == tmp_path / "moved" / "a.txt"


class Fragile(Copies):
    def intact(self, artifact: Artifact) -> str | None:
        return "its card is gone" if self.env_gone else None

    env_gone = False


def test_a_stage_can_say_that_its_artifact_is_no_longer_usable(store: Store) -> None:
    stage = Fragile()
    store.ensure(stage)
    assert store.plan(stage).action == "reuse"
    stage.env_gone = True
    assert actions([store.plan(stage)]) == [("copies", "make", "made again: its card is gone")]


class Meddling(Copies):
    def unit(self, path: Path, number: int) -> dict[str, int]:
        (source,) = self.inputs
        (source.path / "a.txt").write_bytes(b"changed while it was read")
        return super().unit(path, number)


def test_a_source_that_changes_during_the_run_makes_nothing(store: Store, given: Path) -> None:
    with pytest.raises(G4Error, match=r"given/a\.txt changed while copies was being made from it"):
        store.ensure(Meddling(inputs=(Source(given),)))
    assert all(p.name.endswith(".partial") for p in (store.home / "artifacts/copies").iterdir())


class Reading(Copies):
    """Each file holds what the input's a.txt held; before the second one, `meddle` is called."""

    meddle: Any = None

    def run(self, work: Work) -> None:
        self.given = work.inputs[0].locate("a.txt")
        super().run(work)

    def unit(self, path: Path, number: int) -> dict[str, int]:
        if self.log:
            with self.log.open("a") as log:
                log.write(f"{path.name}\n")
        if number == 1 and self.meddle:
            self.meddle()
        path.write_bytes(self.given.read_bytes())
        return {"number": number}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("referred", [False, True])
def test_a_source_changed_and_restored_leaves_nothing_wrong_to_resume(
    store: Store,
    given: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dies: bool,
    referred: bool,
) -> None:
    """What was made of other bytes is not gone on with, though the process dies before the end."""
    source = Source(given, ("a.txt",))
    inputs = (Pointer(source) if referred else source,)
    stage = Reading(inputs=inputs, log=tmp_path / "log")
    stage.meddle = lambda: (given / "a.txt").write_bytes(b"FIRST")
    append = journal.append

    def append_and_die(folder: Path, entry: journal.Entry) -> None:
        append(folder, entry)
        if dies and entry.file == "unit-1.bin":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", append_and_die)
        with pytest.raises((Killed, G4Error)):
            store.ensure(stage)
    (given / "a.txt").write_bytes(b"first")
    stage.meddle = None
    made = store.ensure(stage)
    assert {(made.path / name).read_bytes() for name in made.files} == {b"first"}
    assert stage.made().count("unit-0.bin") == 1, "what was whole before the change is kept"


def test_a_run_that_cannot_be_trusted_is_thrown_away(store: Store) -> None:
    stage = Copies()

    class Shifting(Copies):
        def run(self, work: Work) -> None:
            super().run(work)
            self.seed = 9  # what shapes the bytes, with every input still the same

    with pytest.raises(G4Error, match="what copies is made from changed meanwhile"):
        store.ensure(Shifting())
    assert store.plan(stage).action == "make"


def test_a_file_of_an_input_damaged_in_the_store_goes_no_further(store: Store) -> None:
    low = Copies(name="low")
    made = store.ensure(low)
    path = made.path / "unit-1.bin"
    right = path.read_bytes()
    path.write_bytes(bytes(len(right)))
    assert store.plan(low).reason == "made again: its file unit-1.bin has changed"
    store.ensure(Copies(name="high", inputs=(low,)))
    assert path.read_bytes() == right


def test_a_second_plan_reads_no_file_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.ensure(Copies())
    monkeypatch.setattr(hashes_room, "_read", lambda *_: pytest.fail("a file was read again"))
    assert store.plan(Copies()).action == "reuse"


def test_a_read_only_store_gives_what_it_has(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store.ensure(Copies())
    (store.home / "locks").rename(tmp_path / "locks")
    (store.home / "locks").write_text("so that a lock would fail")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(store, "writable", False)
    assert store.ensure(Copies()) == made
    with store.using(made):
        pass
    assert [entry.state for entry in cache.entries(store)] == ["complete"]


def test_a_folder_where_a_lock_should_be_is_one_clear_error(store: Store) -> None:
    made = store.ensure(Copies())
    store.lock(made.identity).unlink(missing_ok=True)
    store.lock(made.identity).mkdir()
    with pytest.raises(G4Error, match=r"the lock .* cannot be used \(Is a directory\)"):
        store.using(made).__enter__()
    with pytest.raises(G4Error, match=r"the lock .* cannot be used"):
        cache.entries(store)


def test_using_what_is_gone_is_an_error(store: Store) -> None:
    made = store.ensure(Copies())
    with store.using(made), store.using(made):
        pass
    store.discard(made.path)
    with pytest.raises(G4Error, match=r"copies [0-9a-f]{12} was removed from the store"):
        store.using(made).__enter__()
