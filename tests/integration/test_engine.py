"""The engine's versions against transformers: logprobs prove every claim about weights."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils as layer_utils

from rose.schemas.arrays import pack_logprobs
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import SampledTokensBuilder, VersionSpan
from rose.schemas.samples import Sample, SampleTurn
from rose.workers.executor.vllm import spare_weights
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineStartError, FinishedTurn, SwapRefused
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.logprobs import token_logprobs
from rose.workers.trainer.selection import sample_error
from tests.support.engine_fixtures import (
    BLOCK,
    MAX_MODEL_LEN,
    MAX_RUNNING,
    TOLERANCE,
    EngineFixture,
    contexts_of,
    difference,
    folder_config,
    sampled_logprobs,
    started_engine,
    tokens_of,
)
from tests.support.model_families import tiny_policy
from tests.support.policy_folders import VOCABULARY, new_mixture, new_policy, save_policy, tensors_of
from tests.support.sample_fixtures import sample, turns_of

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    with started_engine(tmp_path_factory.mktemp("policy"), tied=request.param) as engine_fixture:
        yield engine_fixture


one_head = pytest.mark.parametrize("started", [True], indirect=True, ids=["tied"])
"""Mark of a test for which a tied head makes no difference."""


@pytest.fixture
def engine_fixture(started: EngineFixture) -> Iterator[EngineFixture]:
    yield started
    started.clear()


def fail_after(calls: int, times: int = 1) -> Callable[..., None]:
    """Return a packing function of a layer that fails `times` times after `calls` layers."""
    real = layer_utils.dispatch_cpu_unquantized_gemm
    seen = 0

    def pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        nonlocal seen
        seen += 1
        if calls < seen <= calls + times:
            raise RuntimeError("out of memory")
        real(layer, remove_weight)

    return pack


def test_failed_first_swap_keeps_the_weights_of_the_folder(
    engine_fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_fixture.engine.version == 0, "has to be the first test: no version has been swapped in yet"
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", fail_after(5))
    with pytest.raises(SwapRefused, match="out of memory"):
        engine_fixture.engine.swap(7, tensors_of(new_policy(99, tied=engine_fixture.tied)).items())
    assert engine_fixture.engine.version == 0
    assert engine_fixture.check(0) < TOLERANCE


def test_logprobs_are_those_of_transformers_before_and_after_swaps(engine_fixture: EngineFixture) -> None:
    assert engine_fixture.check(1) < TOLERANCE
    for seed in (2, 3):
        engine_fixture.swap()
        assert engine_fixture.check(seed) < TOLERANCE


class SampledTrajectory:
    """A trajectory that is sampled turn by turn."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.mask = [0] * len(tokens)
        self.turns: list[SampleTurn] = []
        self._logprobs = [0.0] * len(tokens)

    def add(self, turn: FinishedTurn, sampling: Sampling, *, observed: list[int]) -> None:
        self.turns += turns_of([0] * len(self.mask) + [1] * len(tokens_of(turn)), sampling)
        self.tokens += [*tokens_of(turn), *observed]
        self.mask += [1] * len(tokens_of(turn)) + [0] * len(observed)
        self._logprobs += [*sampled_logprobs(turn).tolist(), *[0.0] * len(observed)]

    def sample(self) -> Sample:
        made = sample(tokens=self.tokens, mask=self.mask)
        return msgspec.structs.replace(made, turns=tuple(self.turns), logprobs=pack_logprobs(self._logprobs))


@one_head
@pytest.mark.parametrize("temperatures", [[0.7, 0.7], [1.3, 1.3], [0.7, 1.3]])
def test_on_policy_importance_ratio_of_engine_and_trainer_is_1(
    engine_fixture: EngineFixture, temperatures: list[float]
) -> None:
    """The comparison goes through a sample, the sampling of its turns and the logits of the loss. The mean of the
    absolute log ratio is under 1e-3 in float32.
    """
    engine_fixture.swap()
    rng, log_ratios = random.Random(4), list[float]()
    drawn = [SampledTrajectory(contexts_of(rng, rng.randint(5, 40))) for _ in range(12)]
    for temperature in temperatures:
        samplings = [
            Sampling(temperature=temperature, max_tokens=rng.randint(2, 30), seed=n) for n in range(len(drawn))
        ]
        for number, (one, sampling) in enumerate(zip(drawn, samplings, strict=True)):
            engine_fixture.add(str(number), one.tokens, **msgspec.structs.asdict(sampling))
        done = engine_fixture.drain()
        for number, (one, sampling) in enumerate(zip(drawn, samplings, strict=True)):
            one.add(done[str(number)], sampling, observed=contexts_of(rng, 3))
    for each in drawn:
        made = each.sample()
        assert sample_error(made, vocabulary=VOCABULARY, context_tokens=MAX_MODEL_LEN) is None
        weighed = TrainingSample.of(made)
        with torch.no_grad():
            row = torch.tensor([weighed.tokens])
            priced = token_logprobs(engine_fixture.model, row, temperatures=torch.tensor([weighed.temperatures]))
        ratios = (priced[0] - torch.tensor(weighed.behaviour_logprobs))[torch.tensor(each.mask).bool()]
        log_ratios += ratios.abs().tolist()
    assert len(log_ratios) > 100
    assert sum(log_ratios) / len(log_ratios) < 1e-3


def test_failed_later_swap_keeps_the_previous_version(
    engine_fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_fixture.swap()
    version = engine_fixture.engine.version
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", fail_after(5))
    with pytest.raises(SwapRefused, match="out of memory"):
        engine_fixture.engine.swap(version + 1, tensors_of(new_policy(98, tied=engine_fixture.tied)).items())
    assert engine_fixture.engine.version == version
    assert engine_fixture.check(4) < TOLERANCE


REAL_PACK = layer_utils.dispatch_cpu_unquantized_gemm

MOST_ELEMENTS = 3000
"""Element limit of a piece: fewer than the embedding and most layers have."""


class ElementCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts read and written elements, except views: by torch, and of packed layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def pack(self, layer: torch.nn.Module, remove_weight: bool) -> None:
        self.seen += layer.weight.numel()  # type: ignore[operator]
        REAL_PACK(layer, remove_weight)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._opname in ("copy_", "clone", "_to_copy", "equal", "fill_", "aminmax"):
            self.seen += max((each.numel() for each in args if isinstance(each, torch.Tensor)), default=0)
        return function(*args, **(kwargs or {}))


def test_staging_piece_writes_a_bounded_number_of_elements(
    engine_fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_fixture.swap()
    monkeypatch.setattr(spare_weights, "PIECE_ELEMENTS", MOST_ELEMENTS)
    engine_fixture.model = new_policy(93, tied=engine_fixture.tied)
    tensors = tensors_of(engine_fixture.model)
    if engine_fixture.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    pieces = engine_fixture.engine.stage(tensors.items())
    touched = []
    while True:
        with ElementCounter() as elements, monkeypatch.context() as counting:
            counting.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", elements.pack)
            done = next(pieces, True)
        touched.append(elements.seen)
        if done:
            break
    engine_fixture.engine.activate(engine_fixture.engine.version + 1)
    assert max(touched) <= MOST_ELEMENTS
    written = sum(tensor.numel() for tensor in tensors.values())
    assert sum(touched) >= 2 * written - 2 * tensors["model.embed_tokens.weight"].numel(), "copied, and layers packed"
    assert engine_fixture.check(8) < TOLERANCE
    engine_fixture.swap()
    assert engine_fixture.check(9) < TOLERANCE
    monkeypatch.undo()
    engine_fixture.swap()
    assert engine_fixture.check(9) < TOLERANCE


def test_staged_version_changes_nothing_until_activation(engine_fixture: EngineFixture) -> None:
    engine_fixture.swap()
    later = new_policy(97, tied=engine_fixture.tied)
    for _ in engine_fixture.engine.stage(tensors_of(later).items()):
        pass
    assert engine_fixture.check(5) < TOLERANCE
    engine_fixture.engine.activate(engine_fixture.engine.version + 1)
    engine_fixture.model = later
    assert engine_fixture.check(5) < TOLERANCE
    engine_fixture.swap()
    assert engine_fixture.check(6) < TOLERANCE


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda v: v.pop("model.layers.2.mlp.up_proj.weight"), "missing"),
        (lambda v: v.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}), "no tensor model.layers.9"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(95)}), "shape"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(96, dtype=torch.float64)}), "float64"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(96, dtype=torch.int32)}), "int32"),
        (lambda v: v.update({"model.norm.weight": torch.zeros(96, device="meta")}), "no dense data"),
        (lambda v: v.update({"lm_head.weight": torch.zeros(VOCABULARY - 1, 96)}), "lm_head"),
        (
            lambda v: v["model.norm.weight"][7:8].fill_(torch.nan),
            r"model\.norm\.weight holds a value that is not finite",
        ),
        (lambda v: v["model.layers.3.mlp.up_proj.weight"][-1:, -1:].fill_(-torch.inf), "not finite"),
    ],
    ids=["missing", "unknown", "shape", "float64", "int32", "meta", "head", "nan", "infinity"],
)
def test_version_of_another_model_is_refused_before_the_first_write(
    engine_fixture: EngineFixture, spoil: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    version = engine_fixture.engine.version
    spoiled = tensors_of(new_policy(96, tied=engine_fixture.tied))
    spoil(spoiled)
    with pytest.raises(SwapRefused, match=reason):
        engine_fixture.engine.swap(version + 1, spoiled.items())
    assert engine_fixture.engine.version == version
    assert engine_fixture.check(6, turns=4) < TOLERANCE


def test_duplicate_tensor_is_refused(engine_fixture: EngineFixture) -> None:
    tensors = list(tensors_of(engine_fixture.model).items())
    with pytest.raises(SwapRefused, match="twice"):
        engine_fixture.engine.swap(engine_fixture.engine.version + 1, [*tensors, tensors[0]])


def test_narrower_element_type_is_widened_exactly_with_a_tied_head(engine_fixture: EngineFixture) -> None:
    engine_fixture.model = new_policy(95, tied=engine_fixture.tied)
    with torch.no_grad():
        for parameter in engine_fixture.model.parameters():
            parameter.copy_(parameter.bfloat16())
    state = engine_fixture.model.state_dict()  # holds lm_head.weight, tied or not
    tensors = [(name, tensor.bfloat16()) for name, tensor in state.items()]
    random.Random(0).shuffle(tensors)
    engine_fixture.engine.swap(engine_fixture.engine.version + 1, tensors)
    assert engine_fixture.check(7) < TOLERANCE


def test_turn_over_a_swap_continues_with_the_version_of_each_token(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(8), 70)
    engine_fixture.add("over", context, max_tokens=30)
    for _ in range(11):
        engine_fixture.engine.step()
    before, old = engine_fixture.engine.version, engine_fixture.model
    engine_fixture.swap()
    turn = engine_fixture.drain()["over"]
    assert turn.sampled.spans == (VersionSpan(0, 11, before), VersionSpan(11, 30, before + 1))

    # The cache has values of the old weights for all tokens except the last that they sampled.
    ids = torch.tensor([[*context, *tokens_of(turn)]])
    split = len(context) + 10
    with torch.no_grad():
        first = old(input_ids=ids[:, :split], use_cache=True)
        second = engine_fixture.model(input_ids=ids[:, split:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)[0, len(context) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(context) :, None])[:, 0]
    assert float((expected - torch.from_numpy(sampled_logprobs(turn))).abs().max()) < TOLERANCE


def test_turn_that_waits_through_a_swap_has_only_the_new_version(engine_fixture: EngineFixture) -> None:
    context = contexts_of(random.Random(9), 3 * BLOCK + 1)
    engine_fixture.run(context, max_tokens=1)
    for i in range(MAX_RUNNING + 4):
        engine_fixture.add(f"t{i}", context, max_tokens=20)
    engine_fixture.engine.step()
    assert engine_fixture.engine.load().waiting == 4
    engine_fixture.swap()
    done = engine_fixture.drain()
    assert [done[f"t{i}"].cached_tokens for i in range(MAX_RUNNING)] == [3 * BLOCK] * MAX_RUNNING
    for i in range(MAX_RUNNING, MAX_RUNNING + 4):
        assert done[f"t{i}"].sampled.spans == (VersionSpan(0, 20, engine_fixture.engine.version),)
        assert difference(engine_fixture.model, context, done[f"t{i}"]) < TOLERANCE
    assert done[f"t{MAX_RUNNING}"].cached_tokens == 0


@one_head
def test_next_turn_hits_its_prefix_and_only_of_its_version(engine_fixture: EngineFixture) -> None:
    rng = random.Random(10)
    context = contexts_of(rng, 3 * BLOCK)
    first = engine_fixture.run(context, max_tokens=BLOCK + 1)
    assert first.cached_tokens == 0
    longer = [*context, *tokens_of(first), *contexts_of(rng, 5)]
    assert engine_fixture.run(longer, max_tokens=5).cached_tokens == 4 * BLOCK
    engine_fixture.swap()
    assert engine_fixture.run(longer, max_tokens=5).cached_tokens == 0
    assert engine_fixture.run(longer, max_tokens=5).cached_tokens == 4 * BLOCK
    weights = tensors_of(new_policy(94, tied=engine_fixture.tied))
    engine_fixture.engine.swap(engine_fixture.engine.version, weights.items())  # other weights under the same number
    assert engine_fixture.run(longer, max_tokens=5).cached_tokens == 0
    engine_fixture.swap()


def overflows(turn: FinishedTurn) -> bool:
    return not bool(np.isfinite(sampled_logprobs(turn)).all())


def test_nan_of_one_version_reaches_no_turn_of_the_next(tmp_path: Path) -> None:
    """The policy has finite weights with overflowing products. In a small cache each block then has NaN."""
    model = new_policy(0, tied=True)
    kv_bytes = 100 * BLOCK * 4 * 2 * 2 * 32 * 4
    config = folder_config(save_policy(tmp_path, model), policy_version=0, kv_cache_bytes=kv_bytes)
    with closing(Engine(config)) as engine:
        engine_fixture, source = EngineFixture(engine, model, True), random.Random(12)
        vast = {name: tensor * 1e20 if "proj" in name else tensor for name, tensor in tensors_of(model).items()}
        engine.swap(1, vast.items())
        for version in (1, 2):
            for number in range(60):
                engine_fixture.add(f"t{number}", contexts_of(source, source.randint(20, 120)), max_tokens=20)
            assert set(map(overflows, engine_fixture.drain().values())) == {version == 1}
            engine_fixture.swap()
        assert engine_fixture.check(1) < TOLERANCE


def test_overflowing_turn_affects_no_other_turn(tmp_path: Path) -> None:
    """One token meets a huge weight of the first layer: a context with this token has NaN logits."""
    model = new_policy(0, tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[VOCABULARY - 1, 0] = 10.0
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = 3e38
    with closing(Engine(folder_config(save_policy(tmp_path, model), policy_version=0))) as engine:
        engine_fixture, source = EngineFixture(engine, model, False), random.Random(11)
        for wave in range(4):
            contexts = {}
            for number in range(24):
                context = [source.randrange(VOCABULARY - 1) for _ in range(source.randint(2, 120))]
                contexts[f"t{wave}.{number}"] = [VOCABULARY - 1, *context] if number % 3 == 0 else context
            for key, context in contexts.items():
                engine_fixture.add(key, context, max_tokens=12, stop_token_ids=(VOCABULARY - 1,))
            for key, turn in engine_fixture.drain().items():
                if VOCABULARY - 1 in contexts[key]:
                    assert overflows(turn)
                else:
                    tokens, logprobs = tokens_of(turn), sampled_logprobs(turn)
                    # transformers computes no finite logprob for these
                    least = len(tokens) - tokens.count(VOCABULARY - 1)
                    sampled = SampledTokensBuilder(tokens[:least], logprobs[:least].tolist()).build(version=0)
                    sound = msgspec.structs.replace(turn, sampled=sampled)
                    assert not overflows(turn) and (not least or difference(model, contexts[key], sound) < TOLERANCE)


def test_too_small_cache_changes_no_logprob(tmp_path: Path) -> None:
    model = new_policy(20, tied=True)
    kv_bytes = 20 * BLOCK * 4 * 2 * 2 * 32 * 4
    engine = Engine(folder_config(save_policy(tmp_path, model), kv_cache_bytes=kv_bytes))
    small = EngineFixture(engine, model, True, seed=20)
    assert small.check(17) < TOLERANCE
    small.swap()
    for i in range(MAX_RUNNING):
        small.add(f"t{i}", contexts_of(random.Random(i), 60), max_tokens=60)
    for _ in range(30):
        engine.step()
    assert any(turn.request.num_preemptions for turn in engine._turns.values()), "the cache was not too small"
    small.swap()
    held = {turn.request.request_id for turn in engine._turns.values() if turn.request.num_computed_tokens}
    look, found = engine._scheduler.kv_cache_manager.get_computed_blocks, dict[str, int]()

    def noted(request: Any) -> Any:
        blocks, tokens, *rest = look(request)
        found.setdefault(request.request_id, tokens)
        return (blocks, tokens, *rest)

    engine._scheduler.kv_cache_manager.get_computed_blocks = noted
    done = small.drain()
    assert held & found.keys(), "some that the swap overtook were preempted after it"
    assert not any(found.values()), "and who begins anew finds nothing that the old weights computed"
    for turn in done.values():
        assert len(tokens_of(turn)) == len(sampled_logprobs(turn)) == 60
        assert (turn.sampled.spans[0].start, turn.sampled.spans[-1].end) == (0, 60)
        assert all(a.end == b.start for a, b in zip(turn.sampled.spans, turn.sampled.spans[1:], strict=False))
    engine.close()


@pytest.mark.parametrize(
    ("kind", "settings"), [("gemma3_text", {}), ("gemma4_text", {"head_dim": 32, "global_head_dim": 64})]
)
def test_cache_of_several_groups_is_counted_once(tmp_path: Path, kind: str, settings: dict[str, int]) -> None:
    """Each group of layers has blocks of its own for a token, and all groups share one allocation.

    Blocks of wider layers hold fewer tokens.
    """
    layers = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": MAX_MODEL_LEN}
    tiny_policy(kind, tmp_path, num_hidden_layers=3, **layers, **settings)
    with closing(Engine(folder_config(tmp_path))) as engine:
        load, rng = engine.load(), random.Random(1)
        assert load.kv_bytes_total + engine.cache.block_bytes <= 64 << 20
        engine.add("a", contexts_of(rng, 4 * BLOCK - 2), Sampling(max_tokens=4), policy_version=-1)
        engine.step()
        assert load.kv_bytes_free - engine.load().kv_bytes_free == 4 * BLOCK * load.kv_bytes_per_token
        engine.abort("a")


def test_cache_of_layers_with_windows_has_room_for_the_longest_turn(tmp_path: Path) -> None:
    """vLLM starts if the longest turn fits, although blocks for each of its tokens in each group would not."""
    layers = {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2, "sliding_window": BLOCK}
    tiny_policy("gemma3_text", tmp_path, num_hidden_layers=12, max_position_embeddings=2048, **layers)
    small = {"max_model_len": 2048, "step_tokens": 64, "max_running": 4}
    with closing(Engine(folder_config(tmp_path, kv_cache_bytes=4 << 20, **small))) as engine:
        load, cache = engine.load(), engine.cache
        assert load.kv_bytes_total // load.kv_bytes_per_token >= 2048
        assert cache.blocks_of(2048) < len(cache.groups) * 2048 // BLOCK
        assert cache.blocks_of(BLOCK) == len(cache.groups)


def test_settings_refused_by_vllm_are_reported_in_one_sentence(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "good", new_policy(0, tied=True))
    with pytest.raises(EngineStartError, match=r"max seq len.*; executor\.kv_cache_bytes is \d+: raise it, or lower"):
        Engine(folder_config(folder, kv_cache_bytes=4 * BLOCK * 4 * 2 * 2 * 32 * 4))
    with pytest.raises(EngineStartError, match="no_such_argument"):
        Engine(folder_config(folder, vllm_arguments={"no_such_argument": 1}))
    with pytest.raises(EngineStartError, match="only without compilation: leave enforce_eager out"):
        Engine(folder_config(folder, vllm_arguments={"enforce_eager": False}))
    with pytest.raises(EngineStartError, match="dtype"):
        Engine(folder_config(folder, dtype="float99"))
    with pytest.raises(EngineStartError, match=r"executor\.step_tokens \(8\) is less than executor\.max_turns"):
        Engine(folder_config(folder, step_tokens=8))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("Qwen3ForCausalLM", "NoSuchModel"))
    with pytest.raises(EngineStartError, match="NoSuchModel"):
        Engine(folder_config(folder))


def test_head_size_without_a_cpu_kernel_is_refused_at_the_start(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path, head_dim=48)
    with pytest.raises(EngineStartError, match=r"attention heads of 48 elements.*32, 64"):
        Engine(folder_config(tmp_path))


def test_engine_after_its_self_test_runs_turns_unchanged(engine_fixture: EngineFixture) -> None:
    engine_fixture.engine.self_test()
    assert len(engine_fixture.engine) == 0
    assert engine_fixture.check(19, turns=4) < TOLERANCE


MAKE = """
import sys
import rose.workers.executor.vllm.process_env
from pathlib import Path
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineConfig
Engine(EngineConfig(model_folder=Path(sys.argv[1]))).allocate_spare()
"""


def test_policy_that_accepts_no_version_is_refused(tmp_path: Path) -> None:
    """vLLM rearranges expert weights under their old names and shapes: a version would be misread.

    The test runs in its own process, because vLLM has no group for experts after another engine was made.
    """
    folder = save_policy(tmp_path, new_mixture(1))
    made = subprocess.run([sys.executable, "-c", MAKE, str(folder)], cwd=REPOSITORY, capture_output=True, text=True)
    assert "a new policy version cannot be written into model.layers.0.mlp" in made.stderr.splitlines()[-1]
