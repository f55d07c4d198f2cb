"""A stage that is compiled: the same gradients, and nothing lost where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from node.cli import with_value_of_compile
from node.config import build_config
from node.model import compilers
from node.model.compilers import compiler_missing, has_cpp_compiler
from node.model.compiling import NOT_COMPILED, CompiledBody, Compiling
from node.model.dry_run import dry_run
from node.model.execution import Execution, choose_compilation, why_not_compiled
from node.model.memory_model import Precision
from node.model.outer import fused_on, load_fused, outer_step_at_once
from node.model.replica import Replica
from protocol.errors import UserError
from tests.unit.test_compute_path import batch, distance, gradients_of, manifest_of, trained

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler here")
Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Told:
    return []


def replica_that_tells(told: Told, precision: Precision = "fp32", stage: int = 0, stages: int = 1) -> Replica:
    replica = Replica(manifest_of(stages, family="mistral", model__layers=3), stage)
    replica.passes.compiling = Compiling(lambda sentence, event: told.append((sentence, event)))
    replica.passes.execute(Execution(precision, compiles=True))
    return replica


def trained_first(replica: Replica) -> float:
    """The loss of a batch, as the dry run trains it: code is made."""
    with replica.passes.making_code():
        return trained([replica], *batch(replica.manifest))


def not_compiled(precision: Precision) -> Replica:
    replica = Replica(manifest_of(1, family="mistral", model__layers=3), 0)
    replica.passes.execute(Execution(precision))
    return replica


@pytest.mark.long
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_the_gradients_are_the_same(precision: Precision, told: Told) -> None:
    replica, plain = replica_that_tells(told, precision), not_compiled(precision)
    loss = trained([plain], *batch(plain.manifest))
    assert trained_first(replica) == pytest.approx(loss, abs=1e-3)
    assert replica.passes.compiled is not None
    assert replica.passes.compiled.is_ready, told
    assert [event for _, event in told] == ["compiled"]
    assert distance(gradients_of([replica]), gradients_of([plain])) < (1e-4 if precision == "fp32" else 0.02)
    assert replica.flat.gradients.dtype == torch.float32
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained([replica], *batch(replica.manifest))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before  # the code is there


@pytest.mark.long
@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_whole_stage_is_taken_over_where_there_is_room(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledBody, "_has_room", lambda self: True)
    replica, plain = replica_that_tells(told), not_compiled("fp32")
    loss = trained([plain], *batch(plain.manifest))
    assert trained_first(replica) == pytest.approx(loss, abs=1e-3)
    assert [sentence.split(" compiled")[0] for sentence, _ in told] == ["The layers", "The stage"]
    assert distance(gradients_of([replica]), gradients_of([plain])) < 1e-4


def test_a_dry_run_compiles_so_that_no_peer_waits_for_it(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    replica = replica_that_tells(told)
    dry_run(replica, "auto", 0)
    assert [event for _, event in told] == ["compiled"]
    assert not replica.flat.gradients.any()
    tokens = torch.zeros(
        replica.manifest.inner.sequences, replica.manifest.data.sequence_tokens, dtype=torch.long
    )
    replica.passes.last_stage(tokens, tokens)
    assert [event for _, event in told] == ["compiled"]


def test_what_cannot_be_compiled_trains_without_and_says_so_once(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    replica = replica_that_tells(told)
    loss = trained_first(replica)
    assert replica.passes.compiled is not None
    assert not replica.passes.compiled.is_ready
    replica.passes.execute(Execution(compiles=True, at_once=1))  # other inputs: it does not try again
    assert trained_first(replica) == pytest.approx(loss, rel=1e-5)
    [(sentence, event)] = told
    assert event == NOT_COMPILED
    assert "no such instruction" in sentence
    assert "much more" not in sentence


def test_code_that_fails_later_is_dropped_and_no_microbatch_lost(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = False

    def breaking(function: Callable[..., object], **_: object) -> Callable[..., object]:
        def code(*arguments: object, **more: object) -> object:
            if is_broken:
                raise RuntimeError("a guard")
            return function(*arguments, **more)

        return code

    monkeypatch.setattr(torch, "compile", breaking)
    replica = replica_that_tells(told)
    loss = trained_first(replica)
    assert replica.passes.compiled is not None
    assert replica.passes.compiled.is_ready, told
    is_broken = True
    assert trained([replica], *batch(replica.manifest)) == pytest.approx(loss, rel=1e-5)
    assert [event for _, event in told] == ["compiled", NOT_COMPILED]


def test_trying_code_gives_no_parameter_a_gradient(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for stage in (0, 1):
        replica = replica_that_tells(told, "bf16", stage, stages=2)
        assert replica.passes.compiled is not None
        inputs = batch(replica.manifest)[0] if stage == 0 else torch.zeros(3, 32, 16)
        with replica.passes.making_code():
            replica.passes.forward(inputs)
        assert replica.passes.compiled.is_ready, told
        assert not replica.flat.gradients.any()


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("room", "made"), [(99, ["The layers"]), (101, ["The layers", "The stage"])])
def test_a_stage_is_compiled_whole_where_this_node_has_room_for_it(
    room: int, made: list[str], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    replica = replica_that_tells(told)
    tell = replica.passes.compiling.tell
    replica.passes.compiling = Compiling(tell, whole_bytes=100, room=lambda: room)
    replica.passes.execute(Execution(compiles=True))
    trained_first(replica)
    assert [sentence.split(" compiled")[0] for sentence, _ in told] == made


@pytest.mark.parametrize("fails", ["whole", "layers"])
def test_a_dry_run_drops_code_that_takes_more_memory_than_there_is(
    fails: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole stage's first, then all: it is tried on zeros, and runs out of memory with the work."""
    tries = 0

    def compiled(function: Callable[..., object], **_: object) -> Callable[..., object]:
        is_whole = getattr(function, "__name__", "") == "body"

        def code(*arguments: object, **more: object) -> object:
            nonlocal tries
            tries += is_whole
            if (is_whole and tries > 1) or (not is_whole and fails == "layers" and tries > 1):
                raise torch.OutOfMemoryError
            return function(*arguments, **more)

        return code

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(CompiledBody, "_has_room", lambda self: True)
    replica = replica_that_tells(told)
    found = dry_run(replica, "auto", 0)
    assert found.execution.compiles == (fails == "whole")
    before = tries
    trained([replica], *batch(replica.manifest))
    assert tries == before


def test_a_device_that_fails_in_compiled_code_is_not_taken_for_a_compilers_fault(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    replica = replica_that_tells(told)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trained_first(replica)
    assert told == []


# --- what is compiled, counted ---------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Have torch trace what it compiles and run it as it is; returns the number of graphs that it made so far."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compile_(function, dynamic=dynamic, backend="eager")
    )
    torch.compiler.reset()
    fused_on.cache_clear()
    yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    fused_on.cache_clear()
    torch.compiler.reset()


def round_of(replica: Replica, has_partner: bool) -> None:
    """Train a batch, take the inner step and the outer ones of all fragments, in a launch each, as on a GPU."""
    trained([replica], *batch(replica.manifest))
    replica.inner_step(1)
    for each in replica.fragments:
        pull = torch.ones_like(each.phi) if has_partner else None
        outer_step_at_once(each.phi, each.delta, each.theta, pull, (0.5, 0.7, -0.7))
    replica.passes.weights_changed()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("precision", "is_whole"), [("fp32", False), ("bf16", True)])
def test_after_the_dry_run_nothing_is_compiled_in_three_rounds_whoever_asks(
    precision: Precision,
    is_whole: bool,
    told: Told,
    traced: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledBody, "_has_room", lambda self: is_whole)
    replica = replica_that_tells(told, precision)
    load_fused(replica.device, has_fragments=False)
    trained_first(replica)
    assert replica.passes.compiled is not None
    assert replica.passes.compiled.is_ready, told
    made = traced()
    assert made > 0
    for has_partner in (False, True, False):
        round_of(replica, has_partner)
    assert traced() == made  # the modes of gradients and autocast were those of the work
    tokens, labels = batch(replica.manifest)
    replica.passes.last_stage(tokens[:1], labels[:1])  # a peer's, of one sequence
    replica.passes.execute(Execution(precision, compiles=True, at_once=1))  # memory ran out
    replica.passes.last_stage(tokens, labels)
    replica.passes.execute(Execution(precision, recomputes=True, compiles=True))
    replica.passes.last_stage(tokens, labels)
    assert traced() == made
    assert {event for _, event in told} == {"compiled"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_nor_is_the_outer_step_of_a_fragment(traced: Callable[[], int]) -> None:
    replica = Replica(manifest_of(1, outer__fragments=3, outer__alpha=0.0, outer__overlap="none"), 0)
    assert len(replica.fragments) == 3
    load_fused(replica.device, has_fragments=True)
    made = traced()
    assert made > 0
    for has_partner in (False, True):
        round_of(replica, has_partner)
    assert traced() == made


@pytest.fixture
def can_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a C compiler, Python's headers and a cache, in this folder."""
    for folder, name in (("bin", "gcc"), ("include", "Python.h"), ("cache", "code")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    include = {"include": str(tmp_path / "include")}
    monkeypatch.setattr("node.model.compilers.sysconfig.get_paths", lambda scheme: include)
    return tmp_path


@pytest.mark.usefixtures("can_compile")
def test_a_node_compiles_on_gpus_unless_told_otherwise() -> None:
    assert build_config({"join": ("x",)}).compile == "auto"
    assert not choose_compilation(CPU, "auto")
    assert not choose_compilation(GPU, "off")
    assert choose_compilation(GPU, "auto")
    assert choose_compilation(GPU, "on")
    assert why_not_compiled(GPU, "auto") == ""


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("bin/gcc", "no C compiler here"),
        ("include/Python.h", "no Python.h here"),
        ("cache", "TORCHINDUCTOR_CACHE_DIR"),
    ],
)
def test_a_gpu_without_what_triton_needs_trains_uncompiled_and_names_the_command(
    can_compile: Path, missing: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "cache":
        monkeypatch.setattr(compilers, "can_hold_code", lambda folder: folder != can_compile / "cache")
    else:
        (can_compile / missing).unlink()
    assert not choose_compilation(GPU, "auto")
    told = why_not_compiled(GPU, "auto")
    assert "half the speed" in told
    assert command in told
    if missing != "cache":
        assert "apt-get install gcc g++ python3-dev" in told
    assert why_not_compiled(GPU, "off") == why_not_compiled(CPU, "auto") == ""
    with pytest.raises(UserError, match="--compile on cannot compile"):
        choose_compilation(GPU, "on")


def test_a_compiler_of_another_name_counts(can_compile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (can_compile / "bin" / "gcc").rename(can_compile / "bin" / "icx")
    assert compiler_missing("cuda")
    monkeypatch.setenv("CC", "icx")
    assert not compiler_missing("cuda")


def test_a_cache_can_be_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert compilers.can_hold_code(tmp_path / "state" / "cache")
    (tmp_path / "file").touch()
    assert not compilers.can_hold_code(tmp_path / "file" / "cache")


def test_code_is_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is as before afterwards
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    compilers.keep_compiled_in(tmp_path / "state")
    assert compilers.cache_folder() == tmp_path / "elsewhere"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "elsewhere" / "triton")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    compilers.keep_compiled_in(tmp_path / "state")
    assert compilers.cache_folder() == tmp_path / "state"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--compile"], ["--compile", "on"]),
        (["--compile", "--relay"], ["--compile", "on", "--relay"]),
        (["--compile", "off", "--relay"], ["--compile", "off", "--relay"]),
        (["--compile=off"], ["--compile=off"]),
        (["--relay"], ["--relay"]),
    ],
)
def test_the_old_flag_means_on(given: list[str], meant: list[str]) -> None:
    assert with_value_of_compile(given) == meant


def test_an_old_setting_is_understood() -> None:
    assert build_config({"join": ("x",)}, {"NOLOCO_COMPILE": "true"}).compile == "on"
    assert build_config({"join": ("x",), "compile": False}, {}).compile == "off"
