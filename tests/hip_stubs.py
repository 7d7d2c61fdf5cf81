"""Small shared libraries in place of ROCm's: what hip-python calls in them, they record.

They are freestanding; a test reads the records through ctypes, from the same file.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from sources import source

from qla.codegen.spec import Source
from qla.runtime.compilers.zig import ZigHost
from qla.targets import TARGETS

ROOM = 4096
KEPT = 64
VERSION = 70253211
_COMMON = f"""
typedef unsigned u32;
typedef unsigned long long u64;
#define SHOWN extern "C" __attribute__((visibility("default")))
constexpr u32 ROOM = {ROOM}, KEPT = {KEPT};
static void copy(char* to, const char* from, u64 room) {{
  u64 i = 0;
  for (; from[i] && i + 1 < room; ++i) to[i] = from[i];
  to[i] = 0;
}}
"""
HIP = (
    _COMMON
    + """
struct Launch {
  char name[128];
  u32 grid[3], block[3], shared, well_formed;
  u64 stream, params, size;
  unsigned char bytes[ROOM];
};
struct Function { char name[128]; void* module; };
SHOWN int status_of_next = 0;
SHOWN u32 launches = 0, loads = 0, lookups = 0;
SHOWN Launch launched[KEPT] = {};
SHOWN char image[128] = {};
static Function functions[KEPT];
static char modules[KEPT];
static int next() { int status = status_of_next; status_of_next = 0; return status; }

SHOWN int hipRuntimeGetVersion(int* version) { *version = VERSION; return 0; }
SHOWN int hipModuleLoadData(void** module, const void* data) {
  if (int status = next()) return status;
  copy(image, (const char*)data, sizeof(image));
  *module = &modules[loads++ % KEPT];
  return 0;
}
SHOWN int hipModuleGetFunction(void** function, void* module, const char* name) {
  if (int status = next()) return status;
  if ((char*)module < modules || (char*)module >= modules + KEPT) return 400;
  Function* f = &functions[lookups++ % KEPT];
  copy(f->name, name, sizeof(f->name));
  f->module = module;
  *function = f;
  return 0;
}
SHOWN int hipModuleLaunchKernel(void* function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared,
                                void* stream, void** params, void** extra) {
  if (int status = next()) return status;
  Launch& l = launched[launches++ % KEPT];
  copy(l.name, ((Function*)function)->name, sizeof(l.name));
  l.grid[0] = gx; l.grid[1] = gy; l.grid[2] = gz;
  l.block[0] = bx; l.block[1] = by; l.block[2] = bz;
  l.shared = shared; l.stream = (u64)stream; l.params = (u64)params; l.size = 0; l.well_formed = 0;
  const unsigned char* from = nullptr;
  // As the runtime reads it: pairs of a key and a value up to the end's key, the size behind one more pointer.
  while (u64 key = (u64)*extra++) {
    if (key == 3) { l.well_formed = from && l.size && l.size <= ROOM; break; }
    if (key == 1) from = (const unsigned char*)*extra++;
    else if (key == 2) l.size = *(u64*)*extra++;
    else break;
  }
  if (!l.well_formed) return 1;
  for (u64 i = 0; i < l.size; ++i) l.bytes[i] = from[i];
  return 0;
}
"""
)
HIPRTC = (
    _COMMON
    + """
struct Program { char name[128], options[1024], code[160]; u64 digest; };
SHOWN int compile_status = 0;
SHOWN u32 created = 0, destroyed = 0;
SHOWN Program programs[KEPT] = {};
static const char LOG[] = "a line of the log";

SHOWN int hiprtcVersion(int* major, int* minor) { *major = 7; *minor = 2; return 0; }
SHOWN int hiprtcCreateProgram(void** program, const char* text, const char* name, int headers, const char** contents,
                              const char** names) {
  if (headers || contents || names) return 3;
  Program* p = &programs[created++ % KEPT];
  copy(p->name, name, sizeof(p->name));
  p->digest = 0xcbf29ce484222325ull;
  for (; *text; ++text) p->digest = (p->digest ^ (unsigned char)*text) * 0x100000001b3ull;
  *program = p;
  return 0;
}
SHOWN int hiprtcCompileProgram(void* program, int count, const char** options) {
  Program* p = (Program*)program;
  char* to = p->options;
  for (int i = 0; i < count; ++i) {
    copy(to, options[i], p->options + sizeof(p->options) - to);
    while (*to) ++to;
    *to++ = i + 1 < count ? ' ' : 0;
  }
  copy(p->code, "code of ", sizeof(p->code));
  copy(p->code + 8, p->name, sizeof(p->code) - 8);
  return compile_status;
}
static u64 length(const char* text) { u64 n = 0; while (text[n]) ++n; return n + 1; }
SHOWN int hiprtcGetProgramLogSize(void*, u64* size) { *size = sizeof(LOG); return 0; }
SHOWN int hiprtcGetProgramLog(void*, char* to) { copy(to, LOG, sizeof(LOG)); return 0; }
SHOWN int hiprtcGetCodeSize(void* program, u64* size) { *size = length(((Program*)program)->code); return 0; }
SHOWN int hiprtcGetCode(void* program, char* to) {
  copy(to, ((Program*)program)->code, sizeof(Program::code));
  return 0;
}
SHOWN int hiprtcDestroyProgram(void** program) { destroyed += *program != nullptr; *program = nullptr; return 0; }
"""
)


class Launch(ctypes.Structure):
    """A call of hipModuleLaunchKernel."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("well_formed", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("params", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("bytes", ctypes.c_ubyte * ROOM),
    )

    @property
    def data(self) -> bytes:
        return bytes(self.bytes)[: self.size]


class Program(ctypes.Structure):
    """What was made of one call of hiprtcCreateProgram and hiprtcCompileProgram."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("options", ctypes.c_char * 1024),
        ("code", ctypes.c_char * 160),
        ("digest", ctypes.c_uint64),
    )


def digest(text: str) -> int:
    """As the stub of hiprtc takes it of a source."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


class Stub:
    """A stub that this process has mapped.

    Parameters
    ----------
    path : of the very file that hip-python opens.
    """

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)

    def launches(self) -> list[Launch]:
        return list((Launch * KEPT).in_dll(self.library, "launched"))[: self.number("launches").value]

    def programs(self) -> list[Program]:
        return list((Program * KEPT).in_dll(self.library, "programs"))[: self.number("created").value]

    def image(self) -> bytes:
        return (ctypes.c_char * 128).in_dll(self.library, "image").value


def _text(text: str) -> Source:
    made = source("stub", "host")
    return Source(made.spec, made.entry, made.language, text, made.abi, made.limits)


def build(folder: Path, version: int = VERSION, suffix: str = "") -> Path:
    """Build both libraries into ``folder/lib``, and return the folder: it serves as ROCM_PATH."""
    libraries = folder / "lib"
    libraries.mkdir(parents=True)
    compiler = ZigHost(TARGETS["host"])
    for name, text in (("libamdhip64", HIP.replace("VERSION", str(version))), ("libhiprtc", HIPRTC)):
        (libraries / f"{name}.so{suffix}").write_bytes(compiler.compile(_text(text)).data)
    return folder


def run(program: str, rocm: Path, *arguments: str) -> str:
    """Run a program in a process of its own that finds HIP there; its output."""
    here = Path(__file__).parent
    folders = (str(here), str(here / "runtime"), os.environ.get("PYTHONPATH"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "ROCM_PATH": str(rocm),
        "LD_LIBRARY_PATH": str(rocm / "lib"),
        "QLA_CACHE_DIR": str(rocm / "cache"),
        "TMPDIR": str(rocm),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
