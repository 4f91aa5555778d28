"""Reads and checks a model folder: its configuration, and its tensors by their files' headers, without loading them.

Keeps true
- A fault for which vLLM or transformers would raise a traceback (no config, a truncated file, another vocabulary) is
  reported in one sentence.
- ROSE, vLLM and transformers read the same files: those that model.safetensors.index.json names, or model.safetensors
  without an index. A folder of which vLLM or transformers would read other files is refused.
- Tensors of floating point are published. Tensors of integers and booleans, such as masks, and the constant MASKED are
  no weights: each process has them in its own folder.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.schemas.errors import UsageError
from rose.workers.model_config import CONFIG, check_agreement
from rose.workers.tokenizer import TOKENIZER_FILE, check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MISTRAL_CONFIG = "params.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = "[!.]*.safetensors"
"""Pattern of the weight files. vLLM skips hidden files too, such as those that macOS writes beside each file."""
ADAPTER = "adapter_config.json"
QUANTIZED = "quantization_config", "compression_config"
"""Fields of config.json that describe quantized weights."""

TERNARY = "bitnet"
"""Model type, and method of quantization, of policies whose folders hold weights that are not quantized."""

QUANTIZED_FILE = "hf_quant_config.json"
"""File beside config.json that describes quantized weights."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of a file whose content git-lfs has not fetched."""

OTHER_TASK = re.compile("For(?!CausalLM)[A-Z]|RewardModel$")
"""Matches names of classes that are no causal language model, such as LlamaForSequenceClassification."""

OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.gguf")
"""Patterns of weight files in other formats than safetensors."""

NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "training_args", "rng_state")
"""Beginnings of the names of files that trainers write beside the weights."""

WEIGHTS = ("F64", "F32", "F16", "BF16")
"""Element types of weights, as safetensors calls them."""

CONSTANTS = ("BOOL", "I64")
"""Element types of masks and tables, which no training changes."""

MASK = ".bias"
"""Ending of the name of a mask. Old versions of transformers held masks in other integer types."""

INNER = "embed_tokens.weight"
"""Name of the embedding where the inner model was saved alone; the name in a whole model has a prefix."""

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"),
)
"""Sizes in config.json. Some types of models give a list with one size for each layer, or null."""


MASKED = ".masked_bias"
"""End of the name of a constant that old versions of transformers wrote. In float16 it is not finite."""

VOCABULARY_TENSORS = tuple(
    f"{name}.weight" for name in ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
)
"""Name endings of the tensors with one row per token id."""


class FolderError(UsageError):
    """A model folder that holds no language model, or does not say what its tensors are."""


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor of a model folder."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """Element type, by safetensors' name."""

    travels: bool
    """Whether the tensor is published with each version."""


def check_folder(folder: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Do the same as `read_folder`, and check that the tokenizer fits the model. Raises TokenizerError too.

    The load of a tokenizer holds Python's global interpreter lock, for half a second if the tokenizer is large.
    """
    shapes, vocabulary = read_folder(folder)
    tokenizer = folder / TOKENIZER_FILE
    if tokenizer.is_file():
        check_vocabulary(load_tokenizer(tokenizer), vocabulary, folder)
    return shapes, vocabulary


def read_folder(folder: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of the folder's tensors by name, and the vocabulary size. Raises FolderError or ConfigRefused.

    A configuration that trainer and engine would read differently is refused (`check_agreement`).
    """
    config = read_config(folder)
    check_agreement(folder, config)
    shapes, vocabulary = folder_shapes(folder), int(config["vocab_size"])
    for name, shape in shapes.items():
        if name.endswith(VOCABULARY_TENSORS) and shape[:1] != (vocabulary,):
            raise FolderError(
                f"{folder}: {name} has shape {shape}, config.json says a vocabulary of {vocabulary}: the weights "
                "belong to another config or tokenizer"
            )
    return shapes, vocabulary


def check_format(folder: Path) -> None:
    """Refuse an adapter, and weights in other formats without a safetensors file. Raises FolderError."""
    if (folder / ADAPTER).is_file():
        raise FolderError(f"{folder} has an {ADAPTER}: merge the adapter into its model, or remove its files")
    if not any(folder.glob(WEIGHT_FILES)):
        found = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        if weights := [name for name in found if not name.startswith(NO_WEIGHTS)]:
            raise FolderError(f"{folder} holds {weights[0]} and no *.safetensors: convert its weights to safetensors")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the folder's config.json. Raises FolderError unless it describes a causal language model."""
    check_format(folder)
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except OSError:
        if (folder / MISTRAL_CONFIG).is_file():
            raise FolderError(
                f"{folder} is in Mistral's own format ({MISTRAL_CONFIG} and no {CONFIG}): take the folder that the "
                "model is published with for transformers"
            ) from None
        raise FolderError(f"{folder} is not a model folder: it has no readable config.json") from None
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{folder}/config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise FolderError(f"{folder}/config.json is not a JSON object")
    if "vocab_size" not in config and "text_config" in config:
        raise FolderError(f"{folder} is a model of several parts, as text and images: a policy must be of text alone")
    if not isinstance(config.get("vocab_size"), str | int | float) or not config.get("architectures"):
        raise FolderError(f"{folder}/config.json names no architectures or vocab_size: is it a language model's?")
    for name in map(str, config["architectures"]):
        if OTHER_TASK.search(name):
            raise FolderError(f"{folder} holds a {name}, which is no causal language model: take another model")
    for name in SIZES:
        size = config.get(name)
        if isinstance(size, str | int | float) and (type(size) is not int or size < 1):
            raise FolderError(f"{folder}/config.json says {name} {json.dumps(size)}: it must be a whole number above 0")
    if "auto" in (config.get("dtype"), config.get("torch_dtype")):
        raise FolderError(
            f'{folder}/config.json says dtype "auto": write the element type of its weights, as "bfloat16"'
        )
    _check_quantization(folder, config)
    return config


def _check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose files say that its weights are quantized, or a model that quantizes as it computes.

    Raises FolderError.
    """
    if TERNARY in (config.get("model_type"), *(_method(config.get(name)) for name in QUANTIZED)):
        raise FolderError(
            f"{folder} is a BitNet policy, whose layers quantize their weights as they compute: ROSE cannot train it"
        )
    marks = [f"the key {name} in config.json" for name in QUANTIZED if config.get(name)]
    marks += [f"the file {QUANTIZED_FILE}"] * (folder / QUANTIZED_FILE).is_file()
    if marks:
        folder_tensors(folder)  # refuses quantized weights
        raise FolderError(f"{folder} has {marks[0]}, and its weights are not quantized: remove {marks[0]}")


def _method(quantization: Any) -> Any:
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the folder's tensors. Raises FolderError."""
    check_format(folder)
    held = sorted(path.name for path in folder.glob(WEIGHT_FILES))
    if (folder / INDEX).is_file():
        return _indexed(folder, held)
    if not held:
        raise FolderError(f"{folder} holds no *.safetensors: a model folder must say what its tensors are")
    if WHOLE not in held:
        raise FolderError(f"{folder} holds no {WHOLE} and no {INDEX}: transformers would not load {held[0]}")
    if others := [name for name in held if name != WHOLE]:
        raise FolderError(f"{folder} holds {others[0]} beside {WHOLE}, and vLLM would load both: remove one of them")
    return [WHOLE]


def _indexed(folder: Path, held: list[str]) -> list[str]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
        named = set(index["weight_map"].values())
        metadata = index.get("metadata", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FolderError(f"{folder}/{INDEX} does not say in which file each tensor is") from None
    if not isinstance(metadata, dict):
        raise FolderError(f"the `metadata` of {folder}/{INDEX} is no JSON object: write an object there, such as {{}}")
    if not named:
        raise FolderError(f"{folder}/{INDEX} names no file")
    two = WHOLE in held and WHOLE not in named
    if missing := [str(name) for name in named if name not in held]:
        stale = f": fetch that file, or remove {INDEX} if {WHOLE} is the policy" if two else ""
        raise FolderError(f"{folder} lacks {min(missing)}, which {INDEX} names{stale}")
    if two:  # transformers would load that file, and vLLM the files of the index
        raise FolderError(
            f"{folder} holds {WHOLE} and an {INDEX} of other files, which may be two policies: remove {WHOLE}, or "
            f"{INDEX} and the files that it names"
        )
    return sorted(named)


def folder_tensors(folder: Path) -> dict[str, FolderTensor]:
    """Return every tensor of a model folder by name, from the headers of its files. Raises FolderError."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, FolderTensor] = {}
    for name in weight_files(folder):
        try:
            with safe_open(folder / name, framework="np") as opened:
                slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
                found = {key: _tensor(name, key, one) for key, one in slices.items()}
        except (OSError, SafetensorError) as error:
            if _is_pointer(folder / name):
                raise FolderError(
                    f"{folder / name} is a pointer of git-lfs: fetch the file with git lfs pull"
                ) from None
            raise FolderError(f"{folder / name} is no readable safetensors file: {error}") from None
        if twice := tensors.keys() & found.keys():
            raise FolderError(f"{folder} holds {min(twice)} twice, in {tensors[min(twice)].file} and in {name}")
        tensors |= found
    if INNER in tensors:
        raise FolderError(
            f"{folder} holds {INNER}: its weights are of a model without its head (AutoModel), and vLLM finds them by "
            "their names in the whole model: save the policy again with AutoModelForCausalLM"
        )
    for key, tensor in tensors.items():
        if tensor.dtype not in WEIGHTS + CONSTANTS and not (tensor.dtype[0] in "IU" and key.endswith(MASK)):
            raise FolderError(
                f"{folder} holds quantized weights, which cannot be trained ({key} is {tensor.dtype}): take the same "
                "model with weights of 16 or 32 bits"
            )
        if 0 in tensor.shape:
            raise FolderError(
                f"{folder}: {key} has no elements (shape {tensor.shape}): save the policy again, gathered from all the "
                "processes that trained it"
            )
    return tensors


def _tensor(file: str, name: str, header: Any) -> FolderTensor:
    dtype = header.get_dtype()
    travels = dtype in WEIGHTS and not name.endswith(MASKED)
    return FolderTensor(file, tuple(header.get_shape()), dtype, travels)


def _is_pointer(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that is published, by name. Raises FolderError."""
    return {name: tensor.shape for name, tensor in folder_tensors(folder).items() if tensor.travels}


def held_tensors(
    folder: Path, held: Mapping[str, FolderTensor], names: Iterable[str]
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the named tensors of a folder, file by file. `held`: see `folder_tensors`. Raises FolderError."""
    from safetensors import SafetensorError, safe_open

    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(held[name].file, []).append(name)
    for file, names_in_file in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in names_in_file:
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{folder / file} is no readable safetensors file: {error}") from None
