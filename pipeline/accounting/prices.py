"""The prices of device hours: the section `prices` of the configuration.

Keeps true
- Either no class of devices has a price, or all three have one: a class without a price would cost nothing.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from rose.schemas.setting_bounds import check_bounds

MAX_PRICE = 1e9
"""Highest price of a device hour."""

CURRENCY_CHARACTERS = 16
"""Longest name of a currency."""

HOUR_SECONDS = 3600.0


class DeviceClass(Enum):
    """The use of a device, which decides its price."""

    DEDICATED = "dedicated"
    """A device of an executor that only runs rollouts. It costs while it is held, also while it idles."""
    BORROWED = "borrowed"
    """A device of a lending server. It costs for the seconds in which it computes rollouts."""
    TRAINER = "trainer"
    """A device of a rank of the trainer. It costs while it trains and while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one device for one hour, for the cost in the report. Without prices the report has device time only."""

    currency: str = ""
    """Name of the currency, such as USD; needed with prices."""
    dedicated: float | None = None
    """Price of a device hour of a dedicated executor."""
    borrowed: float | None = None
    """Price of a device hour that a lending server computes rollouts; 0 if lending is free."""
    trainer: float | None = None
    """Price of a device hour of the trainer."""
    dedicated_by_device: dict[str, float] = field(default_factory=dict)
    """Prices of dedicated devices by name, such as `NVIDIA H20`, instead of `prices.dedicated`. The report has the
    names."""
    borrowed_by_device: dict[str, float] = field(default_factory=dict)
    """Prices of borrowed devices by name, instead of `prices.borrowed`."""

    def __post_init__(self) -> None:
        by_class = {each.value: getattr(self, each.value) for each in DeviceClass}
        given = {name for name, price in by_class.items() if price is not None}
        others = self.currency or self.dedicated_by_device or self.borrowed_by_device
        if (given or others) and (missing := [name for name in by_class if name not in given]):
            raise ValueError(
                f"a price is missing: {', '.join(missing)}; set dedicated, borrowed and trainer (0 for a class that "
                "costs nothing), or leave the whole section out"
            )
        if not given:
            return
        check_bounds(self, {"dedicated": (0, MAX_PRICE), "borrowed": (0, MAX_PRICE), "trainer": (0, MAX_PRICE)})
        if not (self.currency.isprintable() and 1 <= len(self.currency) <= CURRENCY_CHARACTERS):
            raise ValueError(
                f"currency ({self.currency!r}) must be 1 to {CURRENCY_CHARACTERS} printable characters, as USD: "
                "prices need the name of their currency"
            )
        for name in ("dedicated_by_device", "borrowed_by_device"):
            for device, price in getattr(self, name).items():
                if not (math.isfinite(price) and 0 <= price <= MAX_PRICE):
                    raise ValueError(f"{name}: the price of {device!r} ({price}) must be from 0 to {MAX_PRICE:.0f}")

    def cost(self, device_class: DeviceClass, device: str, device_seconds: float) -> float | None:
        """Return the cost of this device time; None without prices."""
        by_device = {
            DeviceClass.DEDICATED: self.dedicated_by_device,
            DeviceClass.BORROWED: self.borrowed_by_device,
        }.get(device_class, {})
        hourly: float | None = by_device.get(device, getattr(self, device_class.value))
        return None if hourly is None else hourly * device_seconds / HOUR_SECONDS
