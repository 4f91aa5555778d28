"""A version has the tensors of the model folder under any names of transformers; impossible folders are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.schemas.errors import UsageError
from rose.workers.trainer.export import export_policy
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.model_folder import INDEX, WHOLE, FolderError, folder_shapes, read_folder
from rose.workers.weights.tensors import snapshot_of
from tests.support.model_families import tiny_policy

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder."""
    tensors = load_file(folder / WHOLE)
    change(tensors)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


def gpt2_as_it_was_published(folder: Path) -> None:
    """Write GPT-2 without the base-model prefix and with its attention masks."""
    tiny_policy("gpt2", folder)

    def older(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in (0, 1):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(folder, older)


def pythia_as_it_was_published(folder: Path) -> None:
    """Write Pythia with another name of its head, boolean masks, and a constant that is not finite."""
    tiny_policy("gpt_neox", folder)

    def older(tensors: Tensors) -> None:
        assert "embed_out.weight" in tensors
        for layer in (0, 1):
            at = f"gpt_neox.layers.{layer}.attention"
            tensors[f"{at}.bias"] = torch.ones(1, 1, 8, 8).tril().bool()
            tensors[f"{at}.masked_bias"] = torch.tensor(-1e9, dtype=torch.float16)  # minus infinity
            tensors[f"{at}.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.float16)

    rewrite(folder, older)


def tied_with_a_head_of_its_own(folder: Path) -> None:
    tiny_policy("qwen3", folder, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))


def tied_with_its_head_alone(folder: Path) -> None:
    tiny_policy("qwen3", folder, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))


def in_shards_with_stale_ones_beside(folder: Path) -> None:
    tiny_policy("llama", folder)
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    for name in ("model-00009-of-00009.safetensors", "consolidated.safetensors"):
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_file in shards.items():
        save_file({name: tensors[name] for name in of_file}, folder / file, metadata={"format": "pt"})
    placed = {name: file for file, of_file in shards.items() for name in of_file}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))


def in_two_files_one_of_them_with_the_name_of_a_whole(folder: Path) -> None:
    tiny_policy("llama", folder)
    tensors = load_file(folder / WHOLE)
    names = sorted(tensors)
    placed = {name: WHOLE if place % 2 else "extra.safetensors" for place, name in enumerate(names)}
    for file in (WHOLE, "extra.safetensors"):
        own = {name: tensors[name] for name in names if placed[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def experts_apart(folder: Path) -> None:
    tiny_policy("qwen3_moe", folder)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in folder_shapes(folder)


def experts_as_transformers_joins_them(folder: Path) -> None:
    tiny_policy("qwen3_moe", folder).save_pretrained(folder, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in folder_shapes(folder)


def in_bfloat16(folder: Path) -> None:
    tiny_policy("qwen2", folder).bfloat16().save_pretrained(folder)


FOLDERS = [
    gpt2_as_it_was_published,
    pythia_as_it_was_published,
    tied_with_a_head_of_its_own,
    tied_with_its_head_alone,
    in_shards_with_stale_ones_beside,
    in_two_files_one_of_them_with_the_name_of_a_whole,
    experts_apart,
    experts_as_transformers_joins_them,
    in_bfloat16,
]


@pytest.fixture(params=FOLDERS, ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "model")
    return tmp_path / "model"


def held(folder: Path) -> Tensors:
    """Return the tensors of the folder, integers included."""
    index = folder / INDEX
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WHOLE]
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def trained(folder: Path) -> tuple[Any, FolderTensors]:
    """Return a policy that differs from the folder."""
    model = load_policy(folder).eval()
    tensors = FolderTensors(model, folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return model, tensors


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.arange(2, 22)[None], use_cache=False).logits
    return result


def test_version_has_the_tensors_that_a_receiver_of_the_folder_expects(folder: Path) -> None:
    tensors = FolderTensors(load_policy(folder), folder)
    snapshot = snapshot_of(tensors, dtype=None, column_parts=1)
    assert {name: spec.shape for name, spec in snapshot.specs.items()} == folder_shapes(folder)
    tensors.check_values()
    first = dict(tensors)
    for name, tensor in held(folder).items():
        assert name not in first or torch.equal(first[name], tensor.to(first[name].dtype)), name


def test_trained_version_loaded_as_a_folder_is_the_trained_model(folder: Path) -> None:
    """Tensors with another form in the model are converted back."""
    model, tensors = trained(folder)
    kind = type(model)
    again = kind.from_pretrained(None, config=model.config, state_dict=dict(tensors), dtype=torch.float32).eval()
    assert torch.equal(logits(again), logits(model))


def test_exported_folder_keeps_names_and_files_and_can_start_another_run(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    (folder / "deep").mkdir()
    (folder / "deep" / "stale.pth").touch()
    model, tensors = trained(folder)
    export_policy(tensors, tmp_path / "exported")
    exported = tmp_path / "exported"
    for name in ("config.json", "generation_config.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    before, after = held(folder), held(exported)
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if not tensor.is_floating_point())
    assert not list(exported.rglob("*.pth"))
    again = load_policy(exported).eval()
    assert torch.equal(logits(again), logits(model))
    FolderTensors(again, exported).check_values()
    read_folder(exported)


def index_names(*files: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{f}": f for f in files}}))


def add_shard(folder: Path) -> None:
    """Write the weights as one shard with an index too."""
    tensors = load_file(folder / WHOLE)
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    placed = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: save_file({"a": torch.zeros(1)}, f / "adapter_model.safetensors"), "adapter_model.*remove"),
        (lambda f: save_file({"a": torch.zeros(1)}, f / "consolidated.safetensors"), "consolidated.*remove"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "merge the adapter"),
        (lambda f: (f / WHOLE).rename(f / "weights.safetensors"), "holds no model.safetensors"),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.empty(0)})),
            r"model\.layers\.1\.mlp\.up_proj\.weight has no elements \(shape \(0,\)\)",
        ),
        (index_names(WHOLE, "gone.safetensors"), "lacks gone.safetensors"),
        (index_names("../model/model.safetensors"), "lacks ../model/model.safetensors"),
        (add_shard, "may be two policies: remove model.safetensors, or"),
        (index_names("gone.safetensors"), "lacks gone.safetensors.*or remove .* if model.safetensors is the policy"),
        (index_names(), "names no file"),
        (lambda f: (f / INDEX).write_text("[1]"), "does not say in which file"),
        (
            lambda f: (f / INDEX).write_text(json.dumps({"metadata": None, "weight_map": {"a": WHOLE}})),
            "the `metadata` of .* is no JSON object",
        ),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), "lacks 1"),
        (lambda f: rewrite(f, lambda t: t.update({"a": torch.zeros(1, dtype=torch.float8_e4m3fn)})), "F8_E4M3"),
        (
            lambda f: rewrite(f, lambda t: t.update({"embed_tokens.weight": t.pop("model.embed_tokens.weight")})),
            r"holds embed_tokens\.weight: .* save the policy again with AutoModelForCausalLM",
        ),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps(json.loads((f / "config.json").read_text()) | {"quantization_config": {"bits": 4}})
            ),
            "quantized",
        ),
    ],
)
def test_folder_with_ambiguous_files_is_refused_by_trainer_and_executor(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    folder = tmp_path / "model"
    tiny_policy("qwen3", folder)
    spoil(folder)
    with pytest.raises(UsageError, match=reason) as executors:
        read_folder(folder)
    with pytest.raises(UsageError, match=reason) as trainers:
        FolderTensors(load_policy(folder), folder)
    assert not any("\n" in str(caught.value) for caught in (executors, trainers))


@pytest.mark.parametrize("with_config", [False, True], ids=["alone", "beside config.json"])
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "merge the adapter into its model"),
        (["pytorch_model.bin"], r"holds pytorch_model\.bin .*convert its weights to safetensors"),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "training_args.bin"],
            r"holds pytorch_model-00001-of-00002\.bin .*convert",
        ),
        (["consolidated.00.pth", "params.json"], r"holds consolidated\.00\.pth .*convert"),
        (["consolidated.safetensors", "params.json"], r"Mistral's own format|would not load consolidated"),
        (["qwen-q4.gguf"], r"holds qwen-q4\.gguf .*convert"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_folder_without_safetensors_is_refused_by_its_kind(
    tmp_path: Path, files: list[str], reason: str, *, with_config: bool
) -> None:
    folder = tmp_path / "model"
    tiny_policy("qwen3", folder)
    kept = {"config.json"} if with_config else set()
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    for name in files:
        (folder / name).write_bytes(b"{}")
    for read in (read_folder, load_policy):
        with pytest.raises(UsageError, match=reason) as refused:
            read(folder)
        assert "\n" not in str(refused.value)


def test_checkpoint_folder_without_weights_gets_no_advice_to_convert_the_optimizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "architectures": ["Qwen3ForCausalLM"]}')
    for name in ("optimizer.bin", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors"):
        read_folder(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "more.safetensors")
    index_names(WHOLE, "more.safetensors")(tmp_path)
    with pytest.raises(FolderError, match=r"model\.norm\.weight twice, in model.safetensors and in more.safetensors"):
        folder_shapes(tmp_path)


def test_weight_unknown_to_the_model_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"value_head.weight": torch.zeros(1, 64)}))
    with pytest.raises(FolderError, match=r"value_head\.weight, for which transformers' Qwen3ForCausalLM has no place"):
        FolderTensors(load_policy(tmp_path), tmp_path)


def test_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    tied_with_a_head_of_its_own(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(FolderError, match="tie_word_embeddings"):
        load_policy(tmp_path)


def test_loaded_tensor_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    model = load_policy(tmp_path)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(2)
    with pytest.raises(FolderError, match=r"model\.norm\.weight into Qwen3ForCausalLM cannot be put back"):
        FolderTensors(model, tmp_path).check_values()


class Adapter(torch.nn.Module):
    """A linear layer beside a frozen one, with the names that PEFT gives them."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora = torch.nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)


def put_adapter_on(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)


def test_tied_head_that_was_trained_apart_is_refused(tmp_path: Path) -> None:
    """The folder has no head, so a version would be without it."""
    tiny_policy("qwen3", tmp_path, tie_word_embeddings=True)
    model = load_policy(tmp_path)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(FolderError, match=r"lm_head\.weight is model\.embed_tokens\.weight, but they differ"):
        FolderTensors(model, tmp_path)


def test_model_of_which_nothing_that_travels_is_trained_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3_moe", tmp_path)
    model = load_policy(tmp_path).requires_grad_(False)
    FolderTensors(model, tmp_path)  # nothing is trained, so nothing is lost
    model.model.value_head = torch.nn.Linear(64, 1)
    with pytest.raises(FolderError, match=r"such as model\.value_head\.bias: every version would be the same"):
        FolderTensors(model, tmp_path)


@pytest.mark.parametrize("trained", ["embed_tokens.weight", "experts.gate_up_proj"])
def test_value_head_beside_a_trained_weight_is_left_out(tmp_path: Path, trained: str) -> None:
    """The model may hold the weight in another form than the folder."""
    tiny_policy("qwen3_moe", tmp_path)
    model = load_policy(tmp_path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    assert any(parameter.requires_grad for parameter in model.parameters())
    model.model.value_head = torch.nn.Linear(64, 1)
    assert dict(FolderTensors(model, tmp_path)).keys() == folder_shapes(tmp_path).keys()


def wrapped_as_by_ddp(model: Any) -> torch.nn.Module:
    wrapper = torch.nn.Module()
    wrapper.module = model
    return wrapper


@pytest.mark.parametrize(
    "wrap", [torch.compile, wrapped_as_by_ddp, lambda model: torch.compile(wrapped_as_by_ddp(model))]
)
def test_wrapped_model_is_published_as_the_model_itself(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    tiny_policy("qwen3", tmp_path)
    model = load_policy(tmp_path)
    plain, wrapped = dict(FolderTensors(model, tmp_path)), dict(FolderTensors(wrap(model), tmp_path))
    assert plain.keys() == wrapped.keys() and all(torch.equal(plain[name], wrapped[name]) for name in plain)


def test_what_is_no_model_of_transformers_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    adapted = torch.nn.Module()
    adapted.base_model = load_policy(tmp_path)
    with pytest.raises(FolderError, match=r"Module is no transformers\.PreTrainedModel: give the model itself"):
        FolderTensors(adapted, tmp_path)


def test_tensor_that_has_lost_its_shape_is_refused_when_a_version_is_made(tmp_path: Path) -> None:
    """ZeRO-3 empties the parameters of a model after its tensors were named."""
    tiny_policy("qwen3", tmp_path)
    model = load_policy(tmp_path)
    tensors = FolderTensors(model, tmp_path)
    model.model.norm.weight.data = torch.empty(0)
    with pytest.raises(FolderError, match=r"model\.norm\.weight has shape \(0,\) now, and"):
        dict(tensors)


def test_model_with_an_adapter_on_it_is_refused(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    model = load_policy(tmp_path)
    put_adapter_on(model)
    with pytest.raises(
        FolderError, match=r"layers\.1\.self_attn\.q_proj\.weight is inside an adapter.*merge"
    ) as refused:
        FolderTensors(model, tmp_path)
    assert "take it out" not in str(refused.value)


def test_adapter_put_on_later_publishes_no_version_that_lacks_its_weight(tmp_path: Path) -> None:
    tiny_policy("qwen3", tmp_path)
    model = load_policy(tmp_path)
    tensors = FolderTensors(model, tmp_path)
    put_adapter_on(model)
    with pytest.raises(FolderError, match=r"layers\.1\.self_attn\.q_proj\.weight is not in .* was an adapter put on"):
        snapshot_of(tensors, dtype=None, column_parts=1)
