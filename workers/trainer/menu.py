"""The menu of algorithms: the names of advantages, losses and aggregations, and of their published combinations.

Keeps true
- A combination is a name for three parts and nothing else: `trainer.algorithm = "gspo"` trains as the three settings
  `trainer.advantages`, `trainer.loss` and `trainer.aggregation` do that name its parts.
- Each part names the settings that it reads, so a setting without an effect can be refused.

Imports no torch: the configuration is checked before anything heavy is loaded.

Example (names)
    PRESETS["dapo"]                          -> Parts("grpo", "ppo", "token")
    chosen_parts("dapo", loss="dual_clip")   -> Parts("grpo", "dual_clip", "token")
    chosen_parts("my_module:Own")            -> None
"""

from collections.abc import Mapping
from typing import NamedTuple

ADVANTAGES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("scale_by_deviation",),
    "mean": (),
    "rloo": (),
    "maxrl": (),
    "batch": (),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "pass_at_k": ("pass_at_k",),
}
"""Name of each advantage (`algorithms.advantages`), with the settings that it reads."""

WHOLE_STEP_ADVANTAGES = frozenset({"batch", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""The advantages that compare all samples of a step."""

LOSSES: Mapping[str, tuple[str, ...]] = {
    "truncated": ("clip_low", "clip_high", "importance_cap"),
    "ppo": ("clip_low", "clip_high"),
    "dual_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("importance_cap",),
    "gspo": ("gspo_clip_low", "gspo_clip_high"),
    "sapo": ("sapo_temperature_positive", "sapo_temperature_negative"),
    "dppo": ("dppo_threshold", "importance_cap"),
    "decoupled": ("clip_low", "clip_high", "importance_cap"),
}
"""Name of each loss (`algorithms.losses`), with the settings that it reads."""

AGGREGATIONS: Mapping[str, tuple[str, ...]] = {"token": (), "sequence": (), "constant": ("aggregation_tokens",)}
"""Name of each mean over the losses of tokens (`algorithms.combined`), with the settings that it reads."""

ALWAYS_ALLOWED = frozenset({"scale_by_deviation"})
"""Settings that may be set although the chosen parts do not read them."""


class Parts(NamedTuple):
    """The parts of an algorithm."""

    advantages: str
    loss: str
    aggregation: str


PRESETS: Mapping[str, Parts] = {
    "grpo": Parts("grpo", "truncated", "token"),
    "rloo": Parts("rloo", "truncated", "token"),
    "dr_grpo": Parts("mean", "ppo", "constant"),
    "maxrl": Parts("maxrl", "truncated", "token"),
    "pass_at_k": Parts("pass_at_k", "ppo", "token"),
    "lite_ppo": Parts("batch", "ppo", "token"),
    "reinforce_plus_plus": Parts("reinforce_plus_plus", "ppo", "token"),
    "reinforce_plus_plus_baseline": Parts("reinforce_plus_plus_baseline", "ppo", "token"),
    "dapo": Parts("grpo", "ppo", "token"),
    "cispo": Parts("grpo", "cispo", "token"),
    "gspo": Parts("grpo", "gspo", "sequence"),
    "sapo": Parts("grpo", "sapo", "sequence"),
    "dppo": Parts("grpo", "dppo", "token"),
    "decoupled_ppo": Parts("grpo", "decoupled", "token"),
}
"""The combinations that have a name."""

STANDARD = PRESETS["grpo"]


def chosen_parts(algorithm: str, *, advantages: str = "", loss: str = "", aggregation: str = "") -> Parts | None:
    """Return the parts of a named algorithm, each replaced by the name given for it; None for any other algorithm."""
    preset = PRESETS.get(algorithm)
    if preset is None:
        return None
    return Parts(advantages or preset.advantages, loss or preset.loss, aggregation or preset.aggregation)


def read_settings(parts: Parts) -> frozenset[str]:
    """Return the names of the settings that these parts read."""
    return frozenset((*ADVANTAGES[parts.advantages], *LOSSES[parts.loss], *AGGREGATIONS[parts.aggregation]))


PART_SETTINGS = frozenset(
    name for menu in (ADVANTAGES, LOSSES, AGGREGATIONS) for settings in menu.values() for name in settings
)
"""Every setting that only some parts read."""
