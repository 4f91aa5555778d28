r"""A model folder's chat template as a turn format: the text that it writes around observations and actions.

Keeps true
- A format is taken from a template only if rendering one more turn leaves all earlier text and tokens unchanged, for
  several texts, some with actions that begin with reasoning. Otherwise one sentence says what changes.
- White space that a template cuts off the ends of an observation is cut off by the format as well.
- A template runs in jinja2's sandbox and gets the variables that transformers passes: the messages and tools, the
  names of special tokens, and no documents. It gets no date, so its output is the same after every restart.

Two kinds of folders have turns although their chat template rewrites earlier ones, as those that leave the reasoning of
earlier turns out (Qwen3):
- A folder with a `training_template.jinja`: that template is read instead, and must only append. It is tried with those
  actions that it writes as they are. The first observation must be as the chat template writes it.
- A folder whose `turn_format.json` says `{"rendering": "suffix"}`: a later observation is framed with what the chat
  template writes behind the newest action, whatever it makes of earlier turns. What was sampled stays in the context.

Example (ChatML)
    user `a`                      `<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n`
    then assistant `b`, user `c`  `b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n`
    so the stop token is `<|im_end|>`, and a later observation begins with `\n<|im_start|>user\n`
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar

from rose.schemas.errors import UsageError
from rose.workers.tokenizer import CONFIG_FILE, NAMES, PLAIN_CLASSES, TokenizerError, read_object

if TYPE_CHECKING:  # imported where a template is read, which few processes do
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
"""Name of the template's file. In other folders the template is a field of the tokenizer's configuration."""

OTHER_FILES = ("chat_template.json", "processor_config.json")
"""Files in which processors of images and text keep a template."""

OTHER_TEMPLATES = "additional_chat_templates"
"""Folder of the templates that are not the default one."""

BYTE_ORDER_MARK = "\ufeff"
"""Byte order mark, with which some editors begin a file."""

TRAINING_FILE = "training_template.jinja"
"""Name of the template that is read instead, where the chat template rewrites earlier turns."""

TURNS = 5
"""Observations of the longest conversation that is looked at."""

OBSERVATIONS = ("+7-3+8", "two words\nand a second line", '{"tool": [1, 2.5]}', "wide  gaps\n\n\n\tand a tab")
"""Texts of environments that a template is tried with."""

EDGED = ("\nlines at the ends\n\n", " \n\tmore at the ends\n\n ")
"""Texts of environments that begin and end with white space."""

ACTIONS = ("0+7", "Let me see.\n\nIt is 12.", "<think>\n7 and 3\n</think>\n\n=12")
"""Texts of policies that a template is tried with. The last one begins with reasoning."""

TRAINING_ACTIONS = (*ACTIONS, "7 and 3\n</think>\n\n=12")
"""Texts that a training template is tried with: also one whose reasoning begins in the generation prompt."""

FIX = "write a turn_format.json that says how this policy reads turns (docs/guides/environments.md)"

REWRITES = f'add a {TRAINING_FILE}, or {FIX}, such as {{"rendering": "suffix"}}'
"""The advice where a template rewrites earlier turns."""


class TurnFormatError(UsageError):
    """A model folder that does not say how its policy reads turns, or whose chat template is no turn format."""


TRIMS: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    "both ends": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
}
"""Where white space may be cut off an observation; nowhere first."""


class Framing(NamedTuple):
    """Text around observations; `stop` ends every action."""

    first_prefix: str
    prefix: str
    suffix: str
    stop: str
    trim: str = ""
    """Which of TRIMS an observation undergoes."""


Messages = list[dict[str, str]]


class Render(Protocol):
    """A template that writes a conversation, with the generation prompt behind it."""

    def __call__(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text. `tools`: functions that the policy may call, as OpenAI's API declares them."""
        ...


class Template(NamedTuple):
    """A folder's template, and the framing that was read off it."""

    folder: Path
    framing: Framing
    render: Render
    action: str = ""
    """An action that the template writes as it is; empty if the framing is not the template's."""
    only_appends: bool = False
    """Whether the template leaves earlier turns unchanged; otherwise only what it writes behind the newest action is
    used."""


Given = ParamSpec("Given")
Read = TypeVar("Read")


def has_template(model_folder: Path) -> bool:
    """Whether the folder has a chat template."""
    return read_template(model_folder) is not None


def renderer_of(model_folder: Path, named: Mapping[str, str | None]) -> Render | None:
    """Return the folder's chat template as a function; None without one. Raises TurnFormatError."""
    template = read_template(model_folder)
    return None if template is None else _renderer(template, model_folder, named)


def read_chat_template(
    model_folder: Path, *, marks: Collection[str], named: Mapping[str, str | None], suffix: bool = False
) -> Template:
    """Read the turns of a folder by its templates.

    `marks` are the tokenizer's added tokens as text, `named` its special tokens. `suffix`: frame later observations
    with what the chat template writes behind the newest action.

    Raises TurnFormatError for a template that is broken, or does not only append where it has to.
    """
    source = read_template(model_folder)
    assert source is not None
    render = _renderer(source, model_folder, named)
    training = None if suffix else _read_text(model_folder / TRAINING_FILE)
    actions: tuple[str, ...] = ACTIONS
    if suffix:
        framing = _suffix_framing(render, marks, model_folder)
    else:
        if training is not None:
            prompt, render = render, _renderer(training, model_folder, named)
            _check_same_prompt(prompt, render, model_folder)
            actions = _kept_actions(render, model_folder)
        framing = _framing(render, marks, model_folder, actions[0])
    fits = _ends_as if suffix else _writes
    for observation in OBSERVATIONS:
        if not _writes(framing, render, observation, actions[0], 1):
            raise TurnFormatError(
                f"{model_folder}: its chat template does not write the observation {observation!r} as it is: {FIX}"
            )
    for action in actions:
        for observation in OBSERVATIONS:
            if not all(fits(framing, render, observation, action, turns) for turns in range(2, TURNS + 1)):
                raise _changes(model_folder, action, render(_conversation(observation, action, 2)))
    if not suffix and training is None:
        _check_constants(source, framing, render, model_folder)
    framing = framing._replace(trim=_trim(framing, render, model_folder, fits, actions[0]))
    return Template(model_folder, framing, render, actions[0], not suffix)


def _check_same_prompt(prompt: Render, training: Render, folder: Path) -> None:
    for observation in OBSERVATIONS:
        asked = _conversation(observation, "", 1)
        if prompt(asked) != training(asked):
            raise TurnFormatError(
                f"{folder}: {TRAINING_FILE} writes the first observation {observation!r} otherwise than the chat "
                "template, so the policy would be trained on other prompts than it serves: let both begin alike"
            )


def _kept_actions(render: Render, folder: Path) -> tuple[str, ...]:
    """Return the actions that the template writes unchanged behind its generation prompt; at least one."""
    asked = _conversation(OBSERVATIONS[0], "", 1)
    kept = [
        action
        for action in TRAINING_ACTIONS
        if render(_conversation(OBSERVATIONS[0], action, 2)).startswith(f"{render(asked)}{action}")
    ]
    if not kept:
        raise TurnFormatError(
            f"{folder}: {TRAINING_FILE} writes no action as it is, with reasoning or without, so a context could not "
            "grow by what was sampled: let it write the content of assistant messages unchanged"
        )
    return tuple(kept)


def _check_constants(template: str, framing: Framing, render: Render, folder: Path) -> None:
    """Check actions with the strings of the template's code, such as marks of reasoning other than `<think>`.

    Raises TurnFormatError if the template changes such an action once another turn follows.
    """
    from jinja2.nodes import Const

    constants = [each.value for each in _sandbox().parse(template).find_all(Const)]
    texts = [text for text in dict.fromkeys(constants) if isinstance(text, str) and text.strip()]
    texts = [text for text in texts if framing.stop not in text]
    actions: list[str] = []
    for text in texts:
        actions += [f"7 and 3\n{text}\n=12", f"{text.strip()}7 and 3", f"7 and 3{text.strip()}"]
    for action in [*actions, "\n".join(["7 and 3", *texts, "=12"])]:
        try:
            written = render(_conversation(OBSERVATIONS[0], action, TURNS))
        except TurnFormatError:  # the template refuses such an action
            continue
        if written != framed_conversation(framing, OBSERVATIONS[0], action, TURNS):
            raise TurnFormatError(
                f"{folder}: its chat template does not only append (it changes actions of earlier turns, such as "
                f"{action!r}), so a context could not grow by what was sampled: {REWRITES}"
            )


def framed_conversation(framing: Framing, observation: str, action: str, turns: int) -> str:
    """A conversation of so many observations as the framing writes it."""
    observation = TRIMS[framing.trim](observation)
    first = f"{framing.first_prefix}{observation}{framing.suffix}"
    return first + f"{action}{framing.stop}{framing.prefix}{observation}{framing.suffix}" * (turns - 1)


def probes() -> list[tuple[str, str]]:
    """The observations and actions that a format must keep apart in tokens too."""
    pairs = [(observation, action) for observation in OBSERVATIONS for action in ACTIONS]
    return pairs + [(observation, ACTIONS[0]) for observation in EDGED]


def _conversation(observation: str, action: str, turns: int) -> Messages:
    messages = [{"role": "user", "content": observation}]
    for _ in range(turns - 1):
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    return messages


def _first_turn(render: Render, folder: Path) -> tuple[str, str, str]:
    """Return the first observation as it is written, and the text before and after it."""
    first = render(_conversation(OBSERVATIONS[0], "", 1))
    if first.count(OBSERVATIONS[0]) != 1:
        raise TurnFormatError(f"{folder}: its chat template does not write a user's message once, as it is: {FIX}")
    before, after = first.split(OBSERVATIONS[0])
    return first, before, after


def _framing(render: Render, marks: Collection[str], folder: Path, action: str) -> Framing:
    """Read the framing off a conversation of one and of two observations."""
    observation = OBSERVATIONS[0]
    first, first_prefix, suffix = _first_turn(render, folder)
    second = render(_conversation(observation, action, 2))
    if not second.startswith(first):
        kept = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
        if kept < len(first_prefix + observation):
            raise _changes(folder, action, second)
        raise _begins(folder, f"ends its generation prompt with {first[kept:]!r}, and leaves that out of earlier turns")
    gap, found, rest = second[len(first) :].partition(action)
    if gap and found:
        raise _begins(folder, f"writes {gap!r} before an action of earlier turns, and not in its generation prompt")
    if not rest.endswith(observation + suffix):
        raise _changes(folder, action, second)
    return _between(first_prefix, rest.removesuffix(observation + suffix), suffix, marks, folder)


def _suffix_framing(render: Render, marks: Collection[str], folder: Path) -> Framing:
    """Read the framing off a first observation, and off what follows the newest action."""
    observation, action = OBSERVATIONS[0], ACTIONS[0]
    _, first_prefix, suffix = _first_turn(render, folder)
    second = render(_conversation(observation, action, 2))
    _, found, rest = second.rpartition(action)
    if not found or not rest.endswith(observation + suffix):
        raise _changes(folder, action, second)
    return _between(first_prefix, rest.removesuffix(observation + suffix), suffix, marks, folder)


def _between(first_prefix: str, between: str, suffix: str, marks: Collection[str], folder: Path) -> Framing:
    """Split what stands between an action and the next observation into the end of the action and the rest."""
    stop = max((mark for mark in marks if between.startswith(mark)), key=len, default=None)
    if not stop:
        raise TurnFormatError(
            f"{folder}: its chat template ends an assistant's message with no special token, so nothing says where an "
            f"action ends: {FIX}"
        )
    return Framing(first_prefix, between.removeprefix(stop), suffix, stop)


def _writes(framing: Framing, render: Render, observation: str, action: str, turns: int) -> bool:
    """Whether the template writes this conversation as the framing does."""
    return render(_conversation(observation, action, turns)) == framed_conversation(framing, observation, action, turns)


def _ends_as(framing: Framing, render: Render, observation: str, action: str, turns: int) -> bool:
    """Whether the template ends this conversation as the framing does, from the last line of the newest action on."""
    observed = TRIMS[framing.trim](observation)
    written = render(_conversation(observation, action, turns))
    if turns == 1:
        return written == f"{framing.first_prefix}{observed}{framing.suffix}"
    said = action.rsplit("\n", 1)[-1]
    return written.endswith(f"{said}{framing.stop}{framing.prefix}{observed}{framing.suffix}")


Fits = Callable[[Framing, Render, str, str, int], bool]


def _trim(framing: Framing, render: Render, folder: Path, fits: Fits, action: str) -> str:
    """Which of TRIMS the template does to an observation."""
    for trim in TRIMS:
        tried = framing._replace(trim=trim)
        if all(fits(tried, render, text, action, turns) for text in EDGED for turns in range(1, TURNS + 1)):
            return trim
    raise TurnFormatError(
        f"{folder}: its chat template changes the white space at the ends of an observation in a way of its own "
        f"({EDGED[0]!r} is neither kept nor stripped): {FIX}"
    )


def _begins(folder: Path, how: str) -> TurnFormatError:
    """An action does not begin where the generation prompt ends."""
    return TurnFormatError(
        f"{folder}: its chat template {how}, so a context could not grow by what was sampled: {REWRITES}"
    )


def _changes(folder: Path, action: str, second: str) -> TurnFormatError:
    """`second`: a conversation of two observations with this action between them, as the template writes it."""
    what = "it changes earlier turns when one more is added"
    if action.startswith("<think>"):
        what = "it leaves out the reasoning of earlier turns when one more is added"
    elif action not in second:
        what = f"it does not write the action {action!r} as it is"
    return TurnFormatError(
        f"{folder}: its chat template does not only append ({what}), so a context could not grow by what was sampled: "
        f"{REWRITES}"
    )


def _renderer(template: str, folder: Path, named: Mapping[str, str | None]) -> Render:
    from jinja2.meta import find_undeclared_variables

    sandbox = _sandbox()
    known: dict[str, object] = {name: token for name, token in named.items() if token is not None}
    known |= {"documents": None, "add_generation_prompt": True}

    def guarded(call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # a template is a program of somebody else's: it can raise anything
            reason = " ".join(str(error).split())
            raise TurnFormatError(f"{folder}: its chat template fails on plain messages ({reason}): {FIX}") from error

    used = guarded(lambda: find_undeclared_variables(sandbox.parse(template)))
    unnamed = sorted(used & set(NAMES) - set(named))
    if unnamed and reading(read_object, folder / CONFIG_FILE).get("tokenizer_class") not in PLAIN_CLASSES:
        raise TurnFormatError(
            f"{folder}: its chat template writes {unnamed[0]}, and no file says which token that is: name it in "
            f"{CONFIG_FILE}, or null if there is none"
        )
    parsed = guarded(sandbox.from_string, template)

    def render(messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return str(guarded(lambda: parsed.render(messages=messages, tools=list(tools) or None, **known)))

    return render


def _sandbox() -> "ImmutableSandboxedEnvironment":
    """Return jinja2's sandbox with what transformers adds to the language."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}`, by which templates mark what the policy says: its body is rendered as it is."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    def refuse(reason: str) -> str:
        raise TemplateError(reason)

    def to_json(value: Any, ensure_ascii: Any = False, indent: Any = None, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    sandbox.globals["raise_exception"] = refuse
    sandbox.filters["tojson"] = to_json
    return sandbox


def read_template(folder: Path) -> str | None:
    """The text of the folder's chat template. Raises TurnFormatError."""
    if (text := _read_text(folder / TEMPLATE_FILE)) is not None:
        return text
    found = reading(read_object, folder / CONFIG_FILE).get("chat_template")
    if isinstance(found, list):  # several, by name
        default = (each for each in found if isinstance(each, dict) and each.get("name") == "default")
        found = next(default, {}).get("template")
    return found if isinstance(found, str) else None


def _read_text(path: Path) -> str | None:
    """The text of a template's file; None without the file. Raises TurnFormatError."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TurnFormatError(f"{path} is no text: {error}") from None
    if text.startswith(BYTE_ORDER_MARK):
        raise TurnFormatError(f"{path} begins with a byte order mark, and so would every context: save it without")
    return text


def unread_template(folder: Path) -> str | None:
    """Where the folder has a chat template that `read_template` does not read; None if nowhere.

    Raises TurnFormatError.
    """
    for name in OTHER_FILES:
        if "chat_template" in reading(read_object, folder / name):
            return name
    if any((folder / OTHER_TEMPLATES).glob("*.jinja")):
        return OTHER_TEMPLATES
    several = isinstance(reading(read_object, folder / CONFIG_FILE).get("chat_template"), list)
    return f"{CONFIG_FILE}, in a list without the name default" if several else None


def reading(read: Callable[Given, Read], *given: Given.args, **named: Given.kwargs) -> Read:
    """Call `read` and return its result. Raises TurnFormatError for a file that cannot be read."""
    try:
        return read(*given, **named)
    except TokenizerError as error:
        raise TurnFormatError(str(error)) from None
