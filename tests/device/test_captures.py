"""Captures of device graphs: none begins unseen, and what is seen can be asked for any moment."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmloader.device import captures


class Graph:
    """Plays torch's class: it captures nothing, and fails on request."""

    def capture_begin(self, pool: Any = None, *, error: type[BaseException] | None = None) -> tuple[str, Any]:
        """Begin."""
        if error is not None:
            raise error
        return "begun", pool

    def capture_end(self, *, error: type[BaseException] | None = None) -> str:
        """End."""
        if error is not None:
            raise error
        return "ended"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Graph]]:
    """A class of graphs that is watched; what was seen is forgotten afterwards."""
    fresh = type("Fresh", (Graph,), dict(vars(Graph)))
    monkeypatch.setattr(captures, "_graph_classes", lambda: [fresh])
    before, watching = captures.count(), set(captures._watching)
    assert captures.watch()
    yield fresh
    assert captures.count() >= before
    captures._under_way.clear()
    captures._watching.intersection_update(watching)


def test_a_capture_is_counted_when_it_begins_and_active_until_it_ends(graphs: type[Graph]) -> None:
    graph, before = graphs(), captures.count()
    assert not captures.active()
    assert graph.capture_begin("pool") == ("begun", "pool")
    assert (captures.count(), captures.active()) == (before + 1, True)
    assert graph.capture_end() == "ended"
    assert (captures.count(), captures.active()) == (before + 1, False)


def test_a_subclass_is_seen_through_its_base(graphs: type[Graph]) -> None:
    class Sub(graphs):  # type: ignore[misc,valid-type]
        def capture_begin(self, pool: Any = None, **kwargs: Any) -> Any:
            return super().capture_begin(pool, **kwargs)

    graph, before = Sub(), captures.count()
    graph.capture_begin()
    assert captures.count() == before + 1
    graph.capture_end()
    assert not captures.active()


def test_watching_again_counts_nothing_twice(graphs: type[Graph]) -> None:
    assert captures.watch()
    before = captures.count()
    graphs().capture_begin()
    assert captures.count() == before + 1


def test_a_moment_tells_of_captures_that_were_under_way_or_began_since(graphs: type[Graph]) -> None:
    one, other = graphs(), graphs()
    before = captures.mark()
    assert not captures.since(before)
    one.capture_begin()
    amid = captures.mark()
    assert captures.since(before)
    assert captures.since(amid)
    one.capture_end()
    after = captures.mark()
    assert captures.since(before)
    assert captures.since(amid)
    assert not captures.since(after)
    other.capture_begin()
    other.capture_end()
    assert captures.since(after)


def test_several_captures_at_a_time_end_one_by_one(graphs: type[Graph]) -> None:
    one, other = graphs(), graphs()
    one.capture_begin()
    other.capture_begin()
    one.capture_end()
    assert captures.active()
    other.capture_end()
    assert not captures.active()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_did_not_begin_is_not_under_way(graphs: type[Graph], error: type[BaseException]) -> None:
    moment = captures.mark()
    with pytest.raises(error):
        graphs().capture_begin(error=error)
    assert not captures.active()
    assert captures.since(moment), "part of it may have been captured"


def test_a_capture_that_ends_with_an_error_has_ended(graphs: type[Graph]) -> None:
    graph = graphs()
    graph.capture_begin()
    with pytest.raises(RuntimeError):
        graph.capture_end(error=RuntimeError)
    assert not captures.active()


def test_an_end_without_a_beginning_is_no_matter(graphs: type[Graph]) -> None:
    graphs().capture_end()
    graph = graphs()
    graph.capture_begin()
    assert captures.active()


def test_a_graph_that_is_dropped_in_the_middle_leaves_its_capture_under_way(graphs: type[Graph]) -> None:
    graphs().capture_begin()
    assert captures.active()


def test_what_is_watched_looks_as_before(graphs: type[Graph]) -> None:
    assert (graphs.capture_begin.__name__, graphs.capture_begin.__doc__) == ("capture_begin", "Begin.")
    assert inspect.signature(graphs.capture_begin) == inspect.signature(Graph.capture_begin)


def test_a_class_that_lets_nobody_in_is_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    for closed in (int, type("Bare", (Graph,), {})):
        monkeypatch.setattr(captures, "_graph_classes", lambda closed=closed: [Graph, closed])
        monkeypatch.setattr(captures, "_watching", {Graph})
        assert not captures.watch()


def test_while_one_holds_it_off_no_capture_begins_in_another_thread(graphs: type[Graph]) -> None:
    graph, moment = graphs(), captures.mark()
    asked, begun = threading.Event(), threading.Event()

    def capture() -> None:
        asked.set()
        graph.capture_begin()
        begun.set()

    thread = threading.Thread(target=capture)
    with captures.held_off() as quiet:
        assert quiet
        thread.start()
        asked.wait()
        assert not captures.since(moment)
        assert not begun.is_set()
    thread.join()
    assert begun.is_set()
    with captures.held_off() as quiet:
        assert not quiet


def test_in_a_forked_child_no_capture_is_under_way_and_nobody_holds_it_off(graphs: type[Graph]) -> None:
    graphs().capture_begin()
    holding, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with captures.held_off():
            holding.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait()
    pid = os.fork()
    if pid == 0:
        quiet = not captures.active()
        graphs().capture_begin()
        os._exit(0 if quiet and captures.active() else 1)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert captures.active()


def test_a_capture_on_the_current_stream_is_seen_whoever_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not captures.active()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert captures.active()
    assert captures.since(captures.mark())


def test_torchs_own_graphs_can_be_watched() -> None:
    kinds = captures._graph_classes()
    assert torch.cuda.CUDAGraph in kinds
    watching = captures._watching.intersection(kinds)
    before = {kind: (vars(kind)["capture_begin"], vars(kind)["capture_end"]) for kind in kinds}
    try:
        assert captures.watch()
        for kind in kinds:
            assert kind in watching or vars(kind)["capture_begin"] is not before[kind][0]
    finally:
        for kind, (begin, end) in before.items():
            kind.capture_begin, kind.capture_end = begin, end  # type: ignore[attr-defined]
        captures._watching.difference_update(set(kinds) - watching)
