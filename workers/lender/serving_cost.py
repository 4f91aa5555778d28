"""What serving's own steps take, learned from them: the T_prf and T_dec of the slack.

Keeps true
- What is learned is what serving takes alone. Its first step after the guest computed finds the guest's data in the
  caches: how much longer that makes it is learned apart (`after_guest_seconds`), and is the guest's doing. It fades
  while none computes: what was taken for a guest's doing, as a busy neighbour's may be, holds none back for ever.
- Steps that only decode and steps with prompt tokens are fitted apart: a decode is bound by reading weights and
  contexts, a prefill by computing.
- Context lengths are not a term of their own: they grow by a token a step, which the fading fit of the decodes follows;
  what it does not follow shows in its error, and every second told here has the error in it.

Units: tokens, seconds. Pure.
"""

from workers.executor.step_cost import UNKNOWN, StepCost

PACE = 0.1
"""Share by which `after_guest_seconds` follows what a step took above its prediction: about the last ten count."""

FADES = 0.001
"""Share that what is known of guests loses with each step of serving's before which none computed: half in 700."""


class ServingCost:
    """Predicted seconds of a tenant that decodes `decoding` requests and computes prompts beside them."""

    def __init__(self, *, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        """Most tokens that one serving step computes; longer prompts take several."""
        self.decode = StepCost(**UNKNOWN)
        self.prefill = StepCost(**UNKNOWN)
        self.after_guest_seconds = 0.0
        """What the first step after the guest takes longer."""

    def observe(self, *, prompt_tokens: int, decoding: int, seconds: float, after_guest: bool = False) -> float:
        """Take in one serving step; returns how many of its seconds it would have taken for any batch, and alone: its
        fixed cost.

        `prompt_tokens` were computed of prompts, beside one token for each of `decoding` requests; `after_guest`: the
        guest has computed since the step before.
        """
        fit, tokens = self.prefill if prompt_tokens else self.decode, prompt_tokens + decoding
        if after_guest:
            self._learn_addition(fit, tokens, seconds)
            seconds = max(0.0, seconds - self.after_guest_seconds)
        else:
            self.after_guest_seconds *= 1.0 - FADES
        fit.observe(tokens, seconds)
        return min(fit.base_seconds, seconds)

    def _learn_addition(self, fit: StepCost, tokens: int, seconds: float) -> None:
        """From a step whose price alone is known; what one in ten takes beyond its error is no addition."""
        if not fit.known:
            return
        alone = fit.seconds(tokens)
        usual = fit.error * alone
        longer = seconds - alone - self.after_guest_seconds
        self.after_guest_seconds = max(0.0, self.after_guest_seconds + PACE * min(max(longer, -usual), usual))

    def prefill_seconds(self, tokens: int, decoding: int) -> float:
        """T_prf: until the last of `tokens` prompt tokens is computed, in steps that decode beside it."""
        if not tokens:
            return 0.0
        steps = -(-tokens // max(1, self.step_tokens - decoding))
        return self.prefill.cautious_seconds(tokens + steps * decoding, steps=steps)

    def step_seconds(self, tokens: int, decoding: int) -> float:
        """T_dec: the next step, which decodes and computes as much of `tokens` prompt tokens as one step holds."""
        if not tokens:
            return self.decode.cautious_seconds(decoding)
        return self.prefill.cautious_seconds(min(tokens + decoding, self.step_tokens))
