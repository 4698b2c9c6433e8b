import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from g4tool.errors import UsageError
from g4tool.pipeline import cache
from g4tool.pipeline import hashes as hashes_room
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store

from .helpers import SIZE, Copies, Pointer
from .test_store import Failing


@pytest.fixture
def chain(store: Store, given: Path) -> tuple[str, str]:
    low = Copies(name="low", inputs=(Source(given),))
    high = Copies(name="high", count=1, inputs=(low,))
    return store.ensure(low).identity, store.ensure(high).identity


def partial(store: Store) -> str:
    stage = Failing(count=4, name="broken")
    with pytest.raises(Exception, match="is full"):
        store.ensure(stage)
    return store.identity(stage)


def test_entries_say_size_state_and_who_needs_whom(store: Store, chain: tuple[str, str]) -> None:
    low, high = chain
    left = partial(store)
    found = {entry.identity: entry for entry in cache.entries(store)}
    assert [entry.stage for entry in cache.entries(store)] == ["broken", "high", "low"]
    assert found[low].state == found[high].state == "complete"
    assert found[left].state == "partial"
    assert (found[low].inputs, found[low].used_by) == ((), (high,))
    assert (found[high].inputs, found[high].used_by) == ((low,), ())
    manifest = (store.home / "artifacts" / "high" / high / "manifest.json").stat().st_size
    assert found[high].size == SIZE + manifest
    assert abs(found[high].made - time.time()) < 60


def test_find_by_prefix(store: Store, chain: tuple[str, str]) -> None:
    low, high = chain
    assert cache.find(store, low).stage == "low"
    entry, artifact = cache.show(store, high[:12])
    assert artifact is not None
    assert artifact.manifest["stage"] == entry.stage == "high"
    with pytest.raises(
        UsageError, match=r"no artifact in .* begins with 'zz': see `g4 cache list`"
    ):
        cache.find(store, "zz")
    with pytest.raises(UsageError, match="begins with ''"):
        cache.find(store, "")
    for entry in cache.entries(store):
        twin = entry.path.with_name(entry.identity[:-1] + "g")
        twin.mkdir()
    with pytest.raises(UsageError, match=rf"2 artifacts begin with '{low[:6]}' \(.*give more"):
        cache.find(store, low[:6])


def test_verify_finds_every_kind_of_damage(
    store: Store, chain: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes_room, "SETTLED_NS", 0)
    low, high = chain
    assert [checked.problems for checked in cache.verify(store)] == [(), ()]
    folder = store.home / "artifacts" / "low" / low
    (folder / "unit-0.bin").unlink()
    path = folder / "unit-1.bin"
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (folder / "extra").write_text("")
    (checked,) = cache.verify(store, low[:20])
    assert checked.entry.identity == low
    assert checked.problems == (
        "unit-0.bin is missing",
        "unit-1.bin has changed",
        "extra does not belong to it",
    )
    (store.home / "artifacts" / "high" / high / "manifest.json").write_text("[")
    assert "no readable manifest" in cache.verify(store, high)[0].problems[0]


def test_verify_reads_files_outside_too(store: Store, given: Path) -> None:
    made = store.ensure(Pointer(Source(given)))
    (given / "a.txt").write_bytes(b"FIRST")
    assert cache.verify(store)[0].problems == (f"{given / 'a.txt'} has changed",)
    assert store.plan(Pointer(Source(given))).identity != made.identity


def test_prune_keeps_what_an_interrupted_run_goes_on_with(
    store: Store, chain: tuple[str, str]
) -> None:
    left = partial(store)
    empty = store.home / "artifacts" / "broken" / ("0" * 64 + ".partial")
    empty.mkdir()
    assert [p.entry.path for p in cache.prune(store)] == [empty]
    found = {entry.identity: entry for entry in cache.entries(store)}
    assert (found[left].state, found[left].files) == ("partial", 2)
    assert found[left].size > 2 * SIZE
    for dry in (True, False):
        (pruned,) = cache.prune(store, partial=True, dry_run=dry)
        assert (pruned.entry.identity, pruned.reason) == (left, "left by an unfinished run")
        assert pruned.removed is not dry
        assert pruned.entry.path.exists() is dry
    assert cache.prune(store) == []
    assert {entry.identity for entry in cache.entries(store)} == set(chain)
    partial(store)
    assert [p.entry.identity for p in cache.prune(store, roots=chain)] == [left]
    partial(store)
    assert [p.removed for p in cache.remove(store, [left])] == [True]


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_an_age_that_is_none_removes_nothing(
    store: Store, chain: tuple[str, str], days: float
) -> None:
    with pytest.raises(UsageError, match="give a number of days from 0 on"):
        cache.prune(store, older_than_days=days)
    assert {entry.identity for entry in cache.entries(store)} == set(chain)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inputs", "abc"),
        ("inputs", [1]),
        ("inputs", [{"identity": "x"}]),
        ("external", []),
        ("external", {"a": {"size": 1}}),
        ("files", {"a": {"size": 1, "sha256": "x", "more": 1}}),
        ("files", {"a": {"size": "1", "sha256": "x"}}),
        ("facts", None),
        ("parameters", "x"),
        ("version", "1"),
        (None, [1]),
    ],
)
def test_a_damaged_manifest_is_listed_and_told(
    store: Store, chain: tuple[str, str], key: str | None, value: object
) -> None:
    _, high = chain
    path = store.home / "artifacts" / "high" / high / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, key: value} if key else value))
    states = {entry.stage: entry.state for entry in cache.entries(store)}
    assert states == {"low": "complete", "high": "damaged"}
    entry, artifact = cache.show(store, high)
    assert (entry.identity, artifact) == (high, None)
    (checked,) = cache.verify(store, high)
    assert "manifest.json is no readable manifest" in checked.problems[0]


def test_verify_compares_manifests_with_each_other(store: Store, given: Path) -> None:
    made = store.ensure(Pointer(Source(given)))
    path = made.path / "manifest.json"
    manifest = json.loads(path.read_text())
    changed = hashlib.sha256(b"FIRST").hexdigest()
    (given / "a.txt").write_bytes(b"FIRST")
    manifest["external"]["a.txt"]["sha256"] = changed
    path.write_text(json.dumps(manifest))
    assert cache.verify(store)[0].problems == ("a.txt has another hash in what it was made from",)
    manifest["inputs"][0]["files"]["a.txt"]["sha256"] = changed
    path.write_text(json.dumps(manifest))
    (problem,) = cache.verify(store)[0].problems
    assert problem.startswith("its manifest's hashes do not give its source")
    manifest["parameters"] = {"more": 1}
    path.write_text(json.dumps(manifest))
    assert "its manifest does not give its identity" in cache.verify(store)[0].problems


def test_prune_keeps_what_the_roots_were_made_from(store: Store, chain: tuple[str, str]) -> None:
    low, high = chain
    other = store.ensure(Copies(seed=9)).identity
    assert [p.entry.identity for p in cache.prune(store, roots=[high])] == [other]
    assert [p.entry.identity for p in cache.prune(store, roots=[low])] == [high]
    assert [p.entry.identity for p in cache.prune(store, roots=[])] == [low]


def test_remove_by_name(store: Store, chain: tuple[str, str]) -> None:
    low, high = chain
    _, artifact = cache.show(store, high)
    assert artifact is not None
    with store.using(artifact):
        assert [p.removed for p in cache.remove(store, [low, high], dry_run=True)] == [False, False]
        gone = {p.entry.identity: (p.reason, p.removed) for p in cache.remove(store, [low, high])}
    assert gone == {low: ("asked for", True), high: ("in use, kept (asked for)", False)}
    assert [entry.identity for entry in cache.entries(store)] == [high]


def test_prune_by_age_and_all(store: Store, chain: tuple[str, str]) -> None:
    low, _ = chain
    old = time.time() - 10 * 86400
    os.utime(store.home / "artifacts" / "low" / low, (old, old))
    assert cache.prune(store, older_than_days=11) == []
    (pruned,) = cache.prune(store, older_than_days=9)
    assert (pruned.entry.identity, pruned.reason) == (low, "older than asked for")
    assert len(cache.prune(store, everything=True)) == 1
    assert cache.entries(store) == []


def test_prune_never_takes_what_is_in_use(store: Store, chain: tuple[str, str]) -> None:
    low, high = chain
    _, artifact = cache.show(store, low)
    assert artifact is not None
    with store.using(artifact):
        states = {entry.identity: entry.state for entry in cache.entries(store)}
        assert states == {low: "in use", high: "complete"}
        pruned = {p.entry.identity: p for p in cache.prune(store, everything=True)}
    assert pruned[high].removed
    assert not pruned[low].removed
    assert pruned[low].reason == "in use, kept (everything was asked for)"
    assert [p.removed for p in cache.prune(store, everything=True)] == [True]


class Pruning(Copies):
    """Prunes everything while it runs: its inputs and itself must survive."""

    def run(self, work) -> None:  # type: ignore[no-untyped-def]
        super().run(work)
        store = Store(work.path.parents[3])
        assert [p.removed for p in cache.prune(store, everything=True)] == [False, False]
        assert (work.inputs[0].path / "unit-0.bin").exists()


def test_a_running_stage_keeps_its_inputs_and_itself(store: Store) -> None:
    made = store.ensure(Pruning(name="top", inputs=(Copies(name="low"),)))
    assert len(made.files) == 3


def test_prune_empties_the_trash_of_a_killed_prune(store: Store) -> None:
    (store.home / "trash" / "x-1").mkdir()
    (store.home / "trash" / "x-1" / "big").write_text("")
    cache.prune(store)
    assert not list((store.home / "trash").iterdir())
