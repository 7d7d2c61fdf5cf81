"""Just enough ELF (64-bit, little-endian) to read notes, undefined symbols and the size of the code."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Any

Buffer = bytes | mmap

_PT_NOTE = 4
_SHT_NOBITS, _SHT_DYNSYM = 8, 11
_SHF_EXECINSTR = 4


@dataclass(frozen=True)
class Note:
    """One entry of a note segment."""

    owner: str
    kind: int
    payload: bytes


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int


def is_elf(data: Buffer) -> bool:
    """Whether the bytes begin like a 64-bit little-endian ELF file."""
    return data[:6] == b"\x7fELF\x02\x01"


def notes(data: Buffer) -> list[Note]:
    """All notes of all note segments; empty for anything that is not such a file."""
    if not is_elf(data):
        return []
    (table,) = struct.unpack_from("<Q", data, 0x20)
    entry_size, count = struct.unpack_from("<HH", data, 0x36)
    found: list[Note] = []
    for i in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, table + i * entry_size)
        if kind == _PT_NOTE:
            found += _notes_in(data[offset : offset + size])
    return found


def _notes_in(segment: bytes) -> Iterator[Note]:
    at = 0
    while at + 12 <= len(segment):
        owner_size, payload_size, kind = struct.unpack_from("<III", segment, at)
        owner_at = at + 12
        payload_at = owner_at + _aligned(owner_size)
        owner = segment[owner_at : owner_at + owner_size].rstrip(b"\0").decode("ascii", "replace")
        yield Note(owner, kind, segment[payload_at : payload_at + payload_size])
        at = payload_at + _aligned(payload_size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def gnu_build_id(data: Buffer) -> str:
    """The linker's build id in hex, or an empty string where there is none."""
    return next((n.payload.hex() for n in notes(data) if n.owner == "GNU" and n.kind == 3), "")


def undefined_symbols(data: Buffer) -> list[str]:
    """Names that the dynamic loader would have to find elsewhere."""
    sections = _sections(data)
    names: list[str] = []
    for table in (s for s in sections if s.kind == _SHT_DYNSYM):
        strings = sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, 24):
            name, _, _, index, _, _ = struct.unpack_from("<IBBHQQ", data, at)
            if name and index == 0:
                names.append(_string(data, strings + name))
    return names


def code_bytes(data: Buffer) -> int:
    """Bytes of all executable sections."""
    return sum(s.size for s in _sections(data) if s.flags & _SHF_EXECINSTR and s.kind != _SHT_NOBITS)


def _sections(data: Buffer) -> list[_Section]:
    if not is_elf(data):
        return []
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    raw = [struct.unpack_from("<IIQQQQI", data, table + i * entry_size) for i in range(count)]
    if not raw:
        return []
    names = raw[names_index][4]
    return [
        _Section(_string(data, names + name), kind, flags, offset, size, link)
        for name, kind, flags, _, offset, size, link in raw
    ]


def _string(data: Buffer, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode("utf-8", "replace")


_FIXED = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANT = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("dict", ">H"), 0xDF: ("dict", ">I"),
}  # fmt: skip


def unpack_msgpack(data: bytes) -> Any:
    """Decode one MessagePack value (all types but the extensions, which code object metadata does not use)."""
    return _unpack(data, 0)[0]


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    head, at = data[at], at + 1
    if head < 0x80:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head in _CONSTANT:
        return _CONSTANT[head], at
    if head in _FIXED:
        form = _FIXED[head]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if head in _SIZED:
        shape, form = _SIZED[head]
        return _unpack_sized(data, at + struct.calcsize(form), shape, struct.unpack_from(form, data, at)[0])
    if head < 0x90:
        return _unpack_sized(data, at, "dict", head & 0x0F)
    if head < 0xA0:
        return _unpack_sized(data, at, "list", head & 0x0F)
    if head < 0xC0:
        return _unpack_sized(data, at, "str", head & 0x1F)
    raise ValueError(f"MessagePack type 0x{head:02x} is not read here")


def _unpack_sized(data: bytes, at: int, shape: str, count: int) -> tuple[Any, int]:
    if shape in ("str", "bytes"):
        raw = data[at : at + count]
        return (raw.decode("utf-8") if shape == "str" else raw), at + count
    items: list[Any] = []
    for _ in range(count * (2 if shape == "dict" else 1)):
        item, at = _unpack(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if shape == "dict" else items), at
