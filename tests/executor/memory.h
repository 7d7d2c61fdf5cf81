// Every load and store of the emitted text: where it may go, and who else was there between the same barriers.
#pragma once
#include "machine.h"

constexpr u16 MANY = 0xFFFF;  // threads

// By granule of LDS: whether an asynchronous load into it has not been waited for.
static u8 under_way[(256 << 10) / 2];

static Region* last_region;
static bool holds(const Region* region, u64 address, u64 size) {
  const u64 at = address - (u64)region->base;
  return at < region->size && at + size <= region->size;
}
static Region* region_of(u64 address, u64 size) {
  if (last_region && holds(last_region, address, size)) return last_region;
  for (u64 i = 0; i < launch->region_count; i++)
    if (holds(launch->regions + i, address, size)) return last_region = launch->regions + i;
  return nullptr;
}

// Notes an access and says whether it was right. `shared`: to LDS, where what earlier workgroups left counts for
// nothing.
template <bool WRITE>
static bool stamp(const Lane* lane, Granule* granule, u64 count, bool shared, const char* name, u64 at, u64 size) {
  const u32 now = launch->phase, mine = block_phase, first = shared ? mine : launch->first_phase;
  const u16 me = lane->thread;
  bool any = false;  // a copy of a record takes its padding along, which need not be written in memory
  for (u64 i = 0; i < count; i++) any |= granule[i].written;
  for (u64 i = 0; i < count; i++) {
    Granule& g = granule[i];
    const char* what = nullptr;
    int other = -1;
    if (!WRITE && (shared ? g.written < mine : !any)) what = "which nothing wrote";
    else if (g.written == now && g.writer != me) {
      what = "which another thread wrote between the same barriers";
      other = g.writer;
    } else if (g.written >= first && g.written < mine) what = "which another workgroup wrote";
    else if (WRITE && g.read == now && g.reader != me) {
      what = "which another thread read between the same barriers";
      other = g.reader == MANY ? -1 : g.reader;
    } else if (WRITE && g.read >= first && g.read < mine) what = "which another workgroup read";
    if (what) {
      char thread[64] = "";
      if (other >= 0) snprintf(thread, sizeof thread, " (wave %d, lane %d)", other / LANES, other % LANES);
      fail(lane, "%s: %s of %llu bytes at byte %llu, %s%s", name, WRITE ? "write" : "read", size, at, what, thread);
      return false;
    }
    if (WRITE) {
      g.written = now;
      g.writer = me;
    } else {
      g.reader = g.read == now && g.reader != me ? MANY : me;
      g.read = now;
    }
  }
  return true;
}

template <bool WRITE>
static bool check(Lane* lane, u64 address, u64 size) {
  if (address - (u64)lane->stack < STACK) return true;  // its registers
  launch->accesses++;
  const char* verb = WRITE ? "write" : "read";
  u64 at = address - (u64)launch->lds;
  const bool shared = at < launch->lds_size;
  if (shared && at + size > launch->lds_size) {
    fail(lane, "LDS: %s of %llu bytes at byte %llu, past its %llu bytes", verb, size, at, launch->lds_size);
    return false;
  }
  const Region* region = shared ? nullptr : region_of(address, size);
  if (!shared && !region) {
    // The nearest region is what was meant, most likely.
    const Region* nearest = nullptr;
    u64 distance = ~0ull;
    for (u64 i = 0; i < launch->region_count; i++) {
      const Region* r = launch->regions + i;
      const u64 end = (u64)r->base + r->size;
      const u64 d = address < (u64)r->base ? (u64)r->base - address : address < end ? 0 : address - end + 1;
      if (d < distance) distance = d, nearest = r;
    }
    const u64 d = address - (u64)launch->lds;
    if (d < 1 << 24 || -d < 1 << 24)
      fail(lane, "out of bounds: %s of %llu bytes at byte %lld of LDS, which has %llu", verb, size, (long long)d,
           launch->lds_size);
    else if (nearest)
      fail(lane, "out of bounds: %s of %llu bytes at byte %lld of %s, which has %llu", verb, size,
           (long long)(address - (u64)nearest->base), nearest->name, nearest->size);
    else fail(lane, "out of bounds: %s of %llu bytes at %llx", verb, size, address);
    return false;
  }
  if (region) {
    at = address - (u64)region->base;
    if (!region->granules) {
      if (!WRITE) return true;
      fail(lane, "%s: write of %llu bytes at byte %llu, which is an input", region->name, size, at);
      return false;
    }
  }
  if (!lane->acquired) {
    fail(lane, "%s: %s at byte %llu after a barrier without an acquire fence", shared ? "LDS" : region->name, verb, at);
    return false;
  }
  lane->released = false;
  const u64 first = at / 2, count = (at + size - 1) / 2 - first + 1;
  if (shared)
    for (u64 i = 0; i < count; i++)
      if (under_way[first + i]) {
        fail(lane, "LDS: %s at byte %llu, where an asynchronous load was not waited for", verb, at);
        return false;
      }
  return stamp<WRITE>(lane, (shared ? launch->lds_granules : region->granules) + first, count, shared,
                      shared ? "LDS" : region->name, at, size);
}
template <bool WRITE>
static inline void access(u64 address, u64 size) {
  Lane* me = current;
  if (address - (u64)me->stack < STACK) return;
  if (!check<WRITE>(me, address, size)) abandon();
}

// ---- what instrumented code calls
#define ACCESS(bytes)                                                       \
  extern "C" void __asan_load##bytes(u64 at) { access<false>(at, bytes); } \
  extern "C" void __asan_store##bytes(u64 at) { access<true>(at, bytes); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __asan_loadN(u64 at, u64 size) { access<false>(at, size); }
extern "C" void __asan_storeN(u64 at, u64 size) { access<true>(at, size); }
extern "C" void* __asan_memcpy(void* to, const void* from, u64 size) {
  access<false>((u64)from, size);
  access<true>((u64)to, size);
  return memcpy(to, from, size);
}
extern "C" void* __asan_memmove(void* to, const void* from, u64 size) {
  access<false>((u64)from, size);
  access<true>((u64)to, size);
  return memmove(to, from, size);
}
extern "C" void* __asan_memset(void* to, int value, u64 size) {
  access<true>((u64)to, size);
  return memset(to, value, size);
}
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_init() {}
extern "C" void __asan_version_mismatch_check_v8() {}

// An index past the end of a C array, be it in LDS or in registers, and an address that is not as aligned as what is
// read or written there; the compiler knows the line.
struct Place {
  const char* file;
  u32 line, column;
};
extern "C" void __ubsan_handle_out_of_bounds_abort(const Place* place, u64 index) {
  fail_here("array index %lld out of bounds, line %u", (long long)index, place->line);
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Place* place, u64 address) {
  fail_here("an address that ends in %llx is not aligned for its type, line %u", address % 16, place->line);
}
