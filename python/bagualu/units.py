"""Bytes in text, both ways; the same rules as bagualu/base/units.h."""

import re

from bagualu.errors import InvalidInput

_FACTORS = {
    "": 1, "B": 1,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}
_MAX_BYTES = 2**63 - 1
_ALLOWED = "a size above 0 such as 96MiB, 1.5GiB, 64MB or 1048576"
_PATTERN = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*([A-Za-z]*)")


def parse_bytes(text: str, where: str, field: str) -> int:
    """Whole bytes, at least 1. Throws InvalidInput on nonsense, zero, negative or overflow."""
    match = _PATTERN.fullmatch(text.strip())
    if not match or match.group(3) not in _FACTORS:
        raise InvalidInput(where, field, repr(text), _ALLOWED)
    whole, fraction, unit = match.groups()
    factor = _FACTORS[unit]
    count = int(whole) * factor
    if fraction:
        count += int(fraction) * factor // 10 ** len(fraction)
    if not 1 <= count <= _MAX_BYTES:
        raise InvalidInput(where, field, repr(text), _ALLOWED)
    return count


def format_bytes(count: int) -> str:
    """ "96.0 MiB", "512 B": one decimal from KiB on."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
