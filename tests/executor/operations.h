// What the lanes of a wave do together.
#pragma once
#include "machine.h"
#include "memory.h"

static Layout layouts[16];
extern "C" void set_layout(int product, const Layout* layout) { layouts[product] = *layout; }

// ---- matrix products
static float number_of(const void* x, u32 i, u32 type) {
  if (type == 0) return ((const float*)x)[i];
  const u16 half = ((const u16*)x)[i];
  return type == 1 ? __builtin_bit_cast(float, (u32)half << 16) : (float)__builtin_bit_cast(_Float16, half);
}
template <int N>
static void multiply(Lane* lane, const Layout& layout) {
  typedef float Numbers __attribute__((ext_vector_type(N), aligned(4)));
  float a[32 * 32], b[32 * 32];  // [group][k][row of the accumulator], [column][k]
  for (int l = 0; l < LANES; l++)
    for (u32 i = 0; i < layout.numbers; i++) {
      a[layout.a_place[l * layout.numbers + i]] = number_of(lane[l].a, i, layout.type);
      b[layout.b_place[l * layout.numbers + i]] = number_of(lane[l].b, i, layout.type);
    }
  for (int l = 0; l < LANES; l++) {
    const float *rows = a + layout.group[l] * layout.k * N, *column = b + layout.column[l] * layout.k;
    Numbers d = *(const Numbers*)lane[l].d;
    for (u32 k = 0; k < layout.k; k++) d += *(const Numbers*)(rows + k * N) * column[k];
    *(Numbers*)lane[l].d = d;
  }
}
static void multiply(Lane* lane) {
  const Layout& layout = layouts[lane->number];
  for (int l = 1; l < LANES; l++)
    if (lane[l].number != lane->number) return fail(lane + l, "another matrix product than that of lane 0");
  launch->products++;
  if (layout.accumulators == 16) multiply<16>(lane, layout);
  else if (layout.accumulators == 4) multiply<4>(lane, layout);
  else fail(lane, "matrix product %d has no layout", lane->number);
}

// ---- exchanges
static void permute(Lane* lane) {
  int numbers[LANES];
  for (int l = 0; l < LANES; l++) numbers[l] = lane[l].number;
  for (int l = 0; l < LANES; l++) lane[l].number = numbers[lane[l].other / 4 & (LANES - 1)];
}

// CDNA4 ISA, "MFMA Transpose Load from LDS", DS_READ_B64_TR_B16: sixteen lanes read four 16-bit numbers each, which are
// a matrix of 4 rows and 16 columns, four lanes to a row; lane l of them is given column l.
static void read_transposed(Lane* lane) {
  for (int l = 0; l < LANES; l++) {
    if ((u64)lane[l].a % 8) return fail(lane + l, "ds_read_tr at an address that is no multiple of 8");
    const u64 at = (u64)lane[l].a - (u64)launch->lds;
    if (at >= launch->lds_size)
      return fail(lane + l, "ds_read_tr at byte %lld of LDS, which has %llu", (long long)at, launch->lds_size);
    if (!check<false>(lane + l, (u64)lane[l].a, 8)) return;
  }
  for (int first = 0; first < LANES; first += 16)
    for (int l = 0; l < 16; l++)
      for (int row = 0; row < 4; row++)
        ((u16*)lane[first + l].d)[row] = ((const u16*)lane[first + 4 * row + l / 4].a)[l % 4];
}

// ---- asynchronous loads: what is under way lands as late as it may, when the wave waits for it
static void load_lds(Wave& wave, Lane* lane) {
  const u32 size = lane->number;
  if (size > 16 || !(launch->load_sizes >> size & 1))
    return fail(lane, "global_load_lds of %u bytes, which this target does not have", size);
  if (wave.under_way == MOST_LOADS) return fail(lane, "more than %d asynchronous loads under way", MOST_LOADS);
  Wave::Load& load = wave.loads[wave.under_way++];
  load.size = size;
  for (int l = 0; l < LANES; l++) {
    if (lane[l].b != lane->b) return fail(lane + l, "global_load_lds to another place than lane 0");
    char* to = (char*)lane->b + l * size;
    const u64 at = (u64)(to - launch->lds);
    if (at >= launch->lds_size)
      return fail(lane + l, "global_load_lds to byte %lld of LDS, which has %llu", (long long)at, launch->lds_size);
    if (!check<false>(lane + l, (u64)lane[l].a, size) || !check<true>(lane + l, (u64)to, size)) return;
    load.to[l] = to;
    memcpy(load.data[l], lane[l].a, size);
  }
  for (int l = 0; l < LANES; l++)
    memset(under_way + (load.to[l] - launch->lds) / 2, 1, (size + 1) / 2);
}
// Until at most `count` are under way. Other loads are not counted: they would only let it wait for fewer of these.
static void wait_for(Wave& wave, Lane* lane, int count) {
  const int landing = wave.under_way - count;
  if (landing <= 0) return;
  for (int n = 0; n < landing; n++) {
    Wave::Load& load = wave.loads[n];
    for (int l = 0; l < LANES; l++) {
      memset(under_way + (load.to[l] - launch->lds) / 2, 0, (load.size + 1) / 2);
      if (!check<true>(lane + l, (u64)load.to[l], load.size)) return;
      memcpy(load.to[l], load.data[l], load.size);
    }
  }
  for (int n = landing; n < wave.under_way; n++) wave.loads[n - landing] = wave.loads[n];
  wave.under_way = count;
}

// ---- one lane's functions: what the device has them give, subnormal numbers taken for zero
static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.f, x) : x; }
extern "C" float __builtin_amdgcn_exp2f(float argument) {
  const float x = flushed(argument);
  if (x != x) return x;
  if (x >= 128.f) return __builtin_inff();
  if (x < -126.f) return 0.f;
  const double whole = __builtin_floor(x + 0.5), t = (x - whole) * 0.69314718055994530942;
  double sum = 1.0;
  for (int n = 13; n > 0; n--) sum = 1.0 + sum * t / n;
  return (float)(sum * __builtin_bit_cast(double, (u64)(1023 + (long long)whole) << 52));
}
extern "C" float __builtin_amdgcn_logf(float argument) {
  const float x = flushed(argument);
  if (x == 0.f) return -__builtin_inff();
  if (!(x > 0.f)) return __builtin_nanf("");
  if (x == __builtin_inff()) return x;
  u64 bits = __builtin_bit_cast(u64, (double)x);
  int exponent = (int)(bits >> 52) - 1023;
  double m = __builtin_bit_cast(double, (bits & 0xFFFFFFFFFFFFF) | 1023ull << 52);
  if (m > 1.4142135623730951) m *= 0.5, exponent++;
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 0.0;
  for (int n = 23; n > 0; n -= 2) sum = sum * square + 1.0 / n;
  return (float)(exponent + 2.0 * s * sum * 1.4426950408889634074);
}
extern "C" float __builtin_amdgcn_rsqf(float argument) {
  const float x = flushed(argument);
  return (float)(1.0 / __builtin_sqrt((double)x));
}

// ---- float to bf16, for which this CPU has no instruction; as a vector, because it returns where one does
typedef u16 executor_u16x8 __attribute__((vector_size(16)));
extern "C" executor_u16x8 __truncsfbf2(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  return executor_u16x8{(u16)(x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0)};
}
