"""What a model folder says of its tensors, without loading them."""

from pathlib import Path

from schemas.errors import UsageError


class FolderError(UsageError):
    """A model folder that does not say what its tensors are."""


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model folder, from the headers of its safetensors files. Raises FolderError."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FolderError(f"{folder} holds no *.safetensors: a model folder must say what its tensors are")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{file} is no readable safetensors file: {error}") from None
    return shapes
