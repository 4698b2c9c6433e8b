"""What compiled code leaves for its loader to find: the undefined symbols of an ELF library."""

import ctypes
import struct
from collections.abc import Iterable

_DYNAMIC_SYMBOLS = 11
_WEAK = 2


def undefined_symbols(code: bytes | memoryview) -> list[str]:
    """Names that a 64-bit little-endian ELF library needs from elsewhere, weak ones left out.

    Raises ValueError for anything else, and for a library that is cut short.
    """
    if bytes(code[:6]) != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF library")
    try:
        (table,) = struct.unpack_from("<Q", code, 0x28)
        size, count = struct.unpack_from("<HH", code, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", code, table + n * size) for n in range(count)]
        found = []
        for header in headers:
            if header[1] != _DYNAMIC_SYMBOLS:
                continue
            offset, length, strings = header[4], header[5], headers[header[6]]
            names = bytes(code[strings[4] : strings[4] + strings[5]])
            for at in range(offset, offset + length, 24):
                name, info, _, section = struct.unpack_from("<IBBH", code, at)
                if name and section == 0 and info >> 4 != _WEAK:
                    found.append(names[name : names.index(b"\0", name)].decode())
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError("a damaged ELF library") from error
    return found


def absent(names: Iterable[str]) -> list[str]:
    """Those of `names` that no library of this process offers to code loaded after it."""
    process = ctypes.CDLL(None)
    return sorted(name for name in set(names) if not hasattr(process, name))
