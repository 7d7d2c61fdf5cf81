// kda_prepare_bf16_k128_v128 for gfx950: per chunk: gate sums, Gram products, triangular inverse.
// Rendered by qla-codegen. Build, with either command:
//   hipcc --genco --offload-arch=gfx950 -O3 -std=c++17 -o kda_prepare_bf16_k128_v128.co kda_prepare_bf16_k128_v128.hip
//   python -m ziglang clang -x hip --cuda-device-only -nogpulib -nogpuinc --offload-arch=gfx950 -mcode-object-version=5 -O3 -std=c++17 -S -emit-llvm -o kda_prepare_bf16_k128_v128.ll kda_prepare_bf16_k128_v128.hip && python -m ziglang clang --target=amdgcn-amd-amdhsa -mcpu=gfx950 -nogpulib -O3 -Xclang -disable-llvm-passes -c -x ir -o kda_prepare_bf16_k128_v128.o kda_prepare_bf16_k128_v128.ll && python -m ziglang ld.lld -shared -o kda_prepare_bf16_k128_v128.co kda_prepare_bf16_k128_v128.o

#ifndef __global__  // a compiler without HIP's headers
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define DEV __device__ inline __attribute__((always_inline))
#define WORKGROUP __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS)))
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef u16 number;  // bf16

constexpr int THREADS = 256;
DEV int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
DEV int block_id() { return __builtin_amdgcn_workgroup_id_x(); }
DEV int wave() { return __builtin_amdgcn_readfirstlane(thread_id() >> 6); }
DEV void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef __bf16 number2 __attribute__((ext_vector_type(2)));
DEV u32 pack(float lo, float hi) { return __builtin_bit_cast(u32, __builtin_convertvector(f32x2{lo, hi}, number2)); }

// ---- arguments: one block; strides in elements
struct Args {
  void* q;
  void* k;
  void* cu_seqlens;
  void* ws_k_in;
  void* ws_k_out;
  void* ws_q_in;
  void* ws_a;
  void* ws_p;
  void* ws_rows;
  void* g;
  void* A_log;
  void* dt_bias;
  void* beta;
  i64 q_stride_b;
  i64 q_stride_t;
  i64 q_stride_h;
  i64 q_stride_d;
  i64 k_stride_b;
  i64 k_stride_t;
  i64 k_stride_h;
  i64 k_stride_d;
  i64 g_stride_b;
  i64 g_stride_t;
  i64 g_stride_h;
  i64 g_stride_d;
  i64 beta_stride_b;
  i64 beta_stride_t;
  i64 beta_stride_h;
  int tokens;
  int sequences;
  int heads;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
  int flags;
  int g_type;
  int A_log_type;
  int dt_bias_type;
  int beta_type;
  float scale;
  float lower_bound;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 128;  // head dim of q and k

// A sequence: rows [start, start + length) of batch row `batch`; its chunks use workspace slots from `slot` on.
struct Sequence {
  int batch, start, length, slot;
};
DEV i64 boundary(const Args& args, int n) {
  return args.cu_is_int64 ? ((const i64*)args.cu_seqlens)[n] : ((const int*)args.cu_seqlens)[n];
}
DEV int clamp(i64 x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }
DEV Sequence sequence_at(const Args& args, int n) {
  if (!args.has_cu_seqlens) return {n, 0, args.tokens, n * ((args.tokens + C - 1) / C)};
  const int start = clamp(boundary(args, n), 0, args.tokens), end = clamp(boundary(args, n + 1), start, args.tokens);
  return {0, start, end - start, start / C + n};
}
// The rows of a head, from a token on.
template <class T>
DEV T* rows_of(T* x, int batch, i64 token, int head, i64 stride_b, i64 stride_t, i64 stride_h) {
  return x + batch * stride_b + token * stride_t + head * stride_h;
}

struct alignas(8) TwoFloats { float x[2]; };

DEV float from_bf16(u16 x) { return __builtin_bit_cast(float, (u32)x << 16); }
DEV float from_fp16(u16 x) { return __builtin_bit_cast(_Float16, x); }
DEV float to_float(u16 x) { return from_bf16(x); }
DEV float exp_(float x) { return __builtin_amdgcn_exp2f(1.44269504f * x); }
// The rounding error of 1 + x is made good by the factor x / ((1 + x) - 1).
DEV float log1p_(float x) {
  const float y = 1.f + x;
  return y == 1.f ? x : 0.693147181f * __builtin_amdgcn_logf(y) * (x / (y - 1.f));
}
DEV float rsqrt_(float x) { return __builtin_amdgcn_rsqf(x); }

#define FOR_EACH(i, n) for (int i = thread_id(); i < (n); i += THREADS)
constexpr int LD = C + 4;   // floats from one row of a [C, C] matrix to the next
constexpr int LDG = K + 8;  // likewise of a [C, K] matrix
constexpr int TEAMS = 1;  // the workgroup
constexpr int LDL = C + 4, LOWER = C * LDL;  // floats of a row and of all of a lower triangular matrix
DEV int lower_at(int r, int c) { return r * LDL + c; }
struct alignas(16) EightFloats { float x[8]; };
template <class T> DEV void put_lower(T& shared, int head, int r, int c, const float* l) {
  *(TwoFloats*)(shared.L[head] + lower_at(r, c)) = TwoFloats{l[0], l[1]};
}

// ---- tiles in LDS
typedef u32 Eight __attribute__((ext_vector_type(4), aligned(8)));  // numbers that lie side by side
// A lane's numbers of a matrix operand: neighbours along k, of one row (A) or column (B).
typedef u16 Four __attribute__((ext_vector_type(4)));
template <int ROWS, int COLUMNS>
struct SharedTile {
  static constexpr int PITCH = COLUMNS + 4;
  __attribute__((aligned(16))) number x[ROWS * PITCH];
  DEV number& at(int row, int column) { return x[row * PITCH + column]; }
  DEV float get(int row, int column) const { return to_float(x[row * PITCH + column]); }
};

// Rows of a tensor into a tile; rows at and after `rows` become zero.
template <int COLUMNS>
DEV void load_tile(SharedTile<C, COLUMNS>& to, const number* from, i64 stride_t, i64, int rows) {
  constexpr int COUNT = C * COLUMNS / 8 / THREADS;  // of one thread, all under way at once
  Eight x[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int i = thread_id() + n * THREADS, row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8;
    x[n] = row < rows ? *(const Eight*)(from + row * stride_t + column) : Eight{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const int i = thread_id() + n * THREADS;
    *(Eight*)&to.at(i / (COLUMNS / 8), i % (COLUMNS / 8) * 8) = x[n];
  }
}

// The sum of the squares of a tile's row.
template <int COLUMNS> DEV float row_square(SharedTile<C, COLUMNS>& t, int row) {
  float sum = 0.f;
  for (int column = 0; column < COLUMNS; column += 8) {
    alignas(16) number x[8];
    *(Eight*)x = *(const Eight*)&t.at(row, column);
    for (int i = 0; i < 8; i++) sum += to_float(x[i]) * to_float(x[i]);
  }
  return sum;
}
DEV void sync_tiles() { sync(); }

// ---- tiles in memory lie row by row: piece i of one holds eight neighbours from (row, column) on
struct Place { int row, column; };
template <int ROWS, int COLUMNS> DEV Place image_place(int i) { return {i / (COLUMNS / 8), i % (COLUMNS / 8) * 8}; }
template <int ROWS, int COLUMNS> DEV int image_pair(int row, int column) { return (row * COLUMNS + column) / 2; }
template <int ROWS> DEV int row_place(int r) { return r; }
DEV void store_eight(void* to, i64 i, const float* x) {
  ((Eight*)to)[i] = Eight{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}
DEV void store_pair(void* to, i64 i, float lo, float hi) { ((u32*)to)[i] = pack(lo, hi); }

// ---- QK[r][c] = sum over d of q[r][d] k[c][d] e^{G[r][d] - G[c][d]} for c <= r, KK likewise
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
DEV Four round_four(f32x4 x) { return __builtin_bit_cast(Four, u32x2{pack(x[0], x[1]), pack(x[2], x[3])}); }
DEV f32x4 to_float(Four x) { return {to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}; }
typedef short Numbers __attribute__((ext_vector_type(4)));
// d[16, 16] + a[16, 16] b[16, 16]: a lane gives numbers 4 (lane / 16) + (0 … 3) of row or column lane % 16, and gets
// such rows of column lane % 16.
DEV f32x4 multiply(Four a, Four b, f32x4 d) {
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Numbers, a), __builtin_bit_cast(Numbers, b), d, 0, 0, 0);
}
// e^{G[later] - G[earlier]} for four channels from d on.
DEV f32x4 decay_of(const float* G, int later, int earlier, int d) {
  const f32x4 x = *(const f32x4*)(G + later * LDG + d) - *(const f32x4*)(G + earlier * LDG + d);
  return {exp_(x[0]), exp_(x[1]), exp_(x[2]), exp_(x[3])};
}
DEV Four decayed(SharedTile<C, K>& t, int r, int d, f32x4 decay) {
  return round_four(to_float(*(const Four*)&t.at(r, d)) * decay);
}
// Lane l of 64 gets the sum over all lanes of their x[l].
DEV float reduce_scatter(float* x) {
  const int lane = thread_id() & 63;
#pragma unroll
  for (int offset = 32; offset; offset >>= 1) {
    const bool high = lane & offset;
#pragma unroll
    for (int i = 0; i < offset; i++) {
      const float sent = high ? x[i] : x[i + offset], kept = high ? x[i + offset] : x[i];
      x[i] = kept + __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ offset) * 4, __builtin_bit_cast(int, sent)));
    }
  }
  return x[0];
}
// A lane's part of the products within the 8 x 8 block on the diagonal from row `top` on: 36 of q and k (c <= r), then
// 28 of k and k (c < r). A lane takes every 64th channel and lets earlier keys decay row by row.
DEV void add_own_products(float* sums, SharedTile<C, K>& q, SharedTile<C, K>& k, const float* G, int top, int lane) {
  for (int d = lane; d < K; d += 64) {
    float keys[8], before = 0.f;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const float at = G[(top + r) * LDG + d], decay = exp_(at - before);
      before = at;
      const float q_r = q.get(top + r, d);
      keys[r] = k.get(top + r, d);
      sums[r * (r + 1) / 2 + r] += q_r * keys[r];
#pragma unroll
      for (int c = 0; c < r; c++) {
        keys[c] *= decay;
        sums[r * (r + 1) / 2 + c] += q_r * keys[c];
        sums[36 + r * (r - 1) / 2 + c] += keys[r] * keys[c];
      }
    }
  }
}
// Sum i of these goes to its row and column.
DEV void put_own_product(float* QK, float* KK, int top, int i, float sum) {
  const int n = i < 36 ? i : i - 36, strict = i < 36 ? 0 : 1;
  int r = strict;  // the last row whose first number is not after n
#pragma unroll
  for (int j = 1; j < 8; j++) r += n >= j * (j + 1) / 2;
  const int at = (top + r) * LD + top + n - r * (r + 1 - 2 * strict) / 2;
  if (i < 36) QK[at] = sum;
  else KK[at] = sum;
}
DEV void decayed_gram(float* QK, float* KK, SharedTile<C, K>& q, SharedTile<C, K>& k, const float* G) {
  const int lane = thread_id() & 63, first = 16 * wave(), row = lane % 16, part = lane / 16 * 4;

  // Sixteen rows for each wave, decayed from row `first`, and earlier keys decayed to it: no exponent is above 0. The
  // last square is the rows' own; its lower left quarter is made here, with its ninth row as pivot.
  if (first < C) {
    constexpr int SQUARES = C / 16;
    f32x4 qk[SQUARES] = {}, kk[SQUARES] = {};
    for (int d = part; d < K; d += 16) {
      const f32x4 decay = decay_of(G, first + row, first, d), own_decay = decay_of(G, first + row, first + 8, d);
      const Four q_rows = decayed(q, first + row, d, decay);
      const Four q_own = row < 8 ? Four{0, 0, 0, 0} : decayed(q, first + row, d, own_decay);
      const Four k_rows = decayed(k, first + row, d, decay);
      const Four k_own = row < 8 ? Four{0, 0, 0, 0} : decayed(k, first + row, d, own_decay);
#pragma unroll
      for (int n = 0; n < SQUARES; n++) {
        if (16 * n > first) continue;
        const bool own = 16 * n == first;
        const int c = 16 * n + row;
        Four keys = decayed(k, c, d, decay_of(G, own ? first + 8 : first, c, d));
        if (own && row >= 8) keys = Four{0, 0, 0, 0};
        qk[n] = multiply(own ? q_own : q_rows, keys, qk[n]);
        kk[n] = multiply(own ? k_own : k_rows, keys, kk[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < SQUARES; n++) {
      if (16 * n > first || (16 * n == first && (part < 8 || row >= 8))) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        QK[(first + part + i) * LD + 16 * n + row] = qk[n][i];
        KK[(first + part + i) * LD + 16 * n + row] = kk[n][i];
      }
    }
  }

  // The blocks on the diagonal go round the waves.
  for (int top = 8 * wave(); top < C; top += 8 * (THREADS / 64)) {
    float sums[64] = {};
    add_own_products(sums, q, k, G, top, lane);
    put_own_product(QK, KK, top, lane, reduce_scatter(sums));
  }
}

// ---- x (strictly lower, [C, LDL]) becomes (I + x)⁻¹: blocks of 16 by substitution, then pairs of inverted blocks are
//      merged, (X1 0; Y X2)⁻¹ = (X1⁻¹ 0; -X2⁻¹ Y X1⁻¹ X2⁻¹), on the matrix cores in float
// d[16, 16] + a[16, 4] b[4, 16]: a lane gives number lane / 16 of row or column lane % 16.
DEV f32x4 multiply(float a, float b, f32x4 d) { return __builtin_amdgcn_mfma_f32_16x16x4f32(a, b, d, 0, 0, 0); }
// d + a b for squares of 16 that begin there; a square in registers has rows 4 (lane / 16) + (0 … 3) of column lane % 16.
DEV f32x4 add_product(const float* a, const float* b, f32x4 d) {
  const int lane = thread_id() & 63;
#pragma unroll
  for (int m = lane / 16, i = 0; i < 4; i++, m += 4) d = multiply(a[lane % 16 * LDL + m], b[m * LDL + lane % 16], d);
  return d;
}
DEV f32x4 add_product(const float* a, f32x4 b, f32x4 d) {
  const int lane = thread_id() & 63;
  const f32x4 row = *(const f32x4*)(a + lane % 16 * LDL + lane / 16 * 4);
#pragma unroll
  for (int i = 0; i < 4; i++) d = multiply(row[i], b[i], d);
  return d;
}
DEV void put_negative(float* to, f32x4 d) {
  const int lane = thread_id() & 63;
#pragma unroll
  for (int i = 0; i < 4; i++) to[(lane / 16 * 4 + i) * LDL + lane % 16] = -d[i];
}
DEV void solve_unit_lower(float* x) {
  const int block = thread_id() / 16 * 16, column = thread_id() % 16;
  float y[16];
  if (thread_id() < C) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      y[i] = i == column ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < i; m++) y[i] = __builtin_fmaf(-x[(block + i) * LDL + block + m], y[m], y[i]);
    }
  }
  sync();
  if (thread_id() < C) {
#pragma unroll
    for (int i = 0; i < 16; i++) x[(block + i) * LDL + block + column] = y[i];
  }
  sync();

  // a wave to a pair of 16 rows each
  const auto square = [&](int row, int column) { return x + 16 * row * LDL + 16 * column; };
  const int j = wave(), n = 2 * j;
  f32x4 first = {};
  if (j < C / 32) first = add_product(square(n + 1, n + 1), add_product(square(n + 1, n), square(n, n), first), f32x4{});
  sync();
  if (j < C / 32) put_negative(square(n + 1, n), first);
  sync();

  // a wave to 16 columns of the pair of 32 rows each
  first = 0.f;
  f32x4 second = {};
  if (j < 2) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      if (m < j) continue;  // zero
      first = add_product(square(2, m), square(m, j), first);
      second = add_product(square(3, m), square(m, j), second);
    }
    second = add_product(square(3, 3), second, add_product(square(3, 2), first, f32x4{}));
    first = add_product(square(2, 2), first, f32x4{});
  }
  sync();
  if (j < 2) {
    put_negative(square(2, j), first);
    put_negative(square(3, j), second);
  }
  sync();
}

// A of a head.
template <class T>
DEV void store_inverses(T& shared, int, void* to, i64 place) {
  solve_unit_lower(shared.L[0]);
  FOR_EACH(i, C * C / 8) {
    const Place p = image_place<C, C>(i);
    const EightFloats x = *(const EightFloats*)(shared.L[0] + lower_at(p.row, p.column));
    const EightFloats beta = *(const EightFloats*)(shared.beta[0] + p.column);
    float a[8];
    for (int e = 0; e < 8; e++) a[e] = p.column + e <= p.row ? x.x[e] * beta.x[e] : 0.f;
    store_eight(to, place * C * C / 8 + i, a);
  }
}

// ---- numbers whose type the caller chose: 0 float, 1 bf16, 2 fp16
DEV float load_number(const void* p, i64 at, int type) {
  return type == 0 ? ((const float*)p)[at] : type == 1 ? from_bf16(((const u16*)p)[at]) : from_fp16(((const u16*)p)[at]);
}
template <int TYPE> DEV float load_as(const void* p, i64 at) {
  if constexpr (TYPE == 0) return ((const float*)p)[at];
  if constexpr (TYPE == 1) return from_bf16(((const u16*)p)[at]);
  return from_fp16(((const u16*)p)[at]);
}
// x[n] = p[at + n stride] for n < count, 0 after them; the type is asked for once, so that all loads are under way
// together.
template <int TYPE, int N> DEV void load_run(float (&x)[N], const void* p, i64 at, i64 stride, int count) {
#pragma unroll
  for (int n = 0; n < N; n++) x[n] = n < count ? load_as<TYPE>(p, at + n * stride) : 0.f;
}
template <int N> DEV void load_numbers(float (&x)[N], const void* p, int type, i64 at, i64 stride, int count) {
  if (type == 0) load_run<0>(x, p, at, stride, count);
  else if (type == 1) load_run<1>(x, p, at, stride, count);
  else load_run<2>(x, p, at, stride, count);
}
constexpr int L2NORM = 1, BETA_SIGMOID = 2, BETA_DOUBLE = 4, GATE_IN_KERNEL = 8, LOWER_BOUND = 16;  // flags
DEV float beta_of(const Args& args, float x) {
  if (args.flags & BETA_SIGMOID) x = 1.f / (1.f + exp_(-x));
  return args.flags & BETA_DOUBLE ? 2.f * x : x;
}

// ---- the record of a (chunk, value head): bytes of its vectors
constexpr int RECORD = 512, DECAY = 0;
DEV void put_row(void* rows, i64 place, int vector, int at, float x) {
  *(float*)((char*)rows + place * RECORD + vector + 4 * at) = x;
}

// ---- what the threads of a workgroup share
struct Shared {
  union {
    struct { SharedTile<C, K> q, k; };  // tokens of the chunk, zero after the sequence's end
    alignas(16) float L[TEAMS][LOWER];  // once their products are known
  };
  float KK[C * LD];
  float G[C * LDG];  // sums of the gates
  float run_sums[C / 16 * K];
  float QK[C * LD];
  alignas(16) float beta[1][C];
  float q_norm[C], k_norm[C];
};

// What P and L take from a row and a column.
struct Row { float scale, beta; };
struct Column { float norm; };

// Slot of a chunk -> its sequence: the last one whose first slot is not after it.
DEV Sequence sequence_of_slot(const Args& args, int slot) {
  if (!args.has_cu_seqlens) return sequence_at(args, (unsigned)slot / ((unsigned)(args.tokens + C - 1) / C));
  int low = 0, high = args.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (boundary(args, middle) / C + middle <= slot) low = middle;
    else high = middle - 1;
  }
  return sequence_at(args, low);
}

// The gate of a token (natural logarithm of the decay), from its raw form where the caller asks for it. e^-88 is the last
// that float holds: sums of larger ones would only lose the small ones beside them, or be inf - inf.
DEV float gate_of(const Args& args, float x, int head, int bias) {
  if (args.flags & GATE_IN_KERNEL) {
    const float shifted = x + (args.dt_bias ? load_number(args.dt_bias, bias, args.dt_bias_type) : 0.f);
    const float rate = args.A_log ? exp_(load_number(args.A_log, head, args.A_log_type)) : 1.f;
    if (args.flags & LOWER_BOUND) x = args.lower_bound / (1.f + exp_(-rate * shifted));
    else x = -rate * (shifted > 20.f ? shifted : log1p_(exp_(shifted)));
  }
  return x < -88.f ? -88.f : x;
}

#define FOR_ROWS(r) FOR_EACH(r, C)

// ---- G = sums of the gates of each channel, at first within runs of 16 rows
struct Decays {};
DEV Decays take_gates(Shared& shared, const Args& args, i64 g, int rows, int value_head) {
  FOR_EACH(i, C / 16 * K) {
    const int d = i % K, run = i / K * 16;
    float x[16], sum = 0.f;
    load_numbers(x, args.g, args.g_type, g + run * args.g_stride_t + d * args.g_stride_d, args.g_stride_t, rows - run);
#pragma unroll
    for (int r = 0; r < 16; r++)
      shared.G[(run + r) * LDG + d] = sum += run + r < rows ? gate_of(args, x[r], value_head, value_head * K + d) : 0.f;
    shared.run_sums[i] = sum;
  }
  return {};
}
DEV float sum_of_gates(const Shared& shared, int d) { return shared.G[(C - 1) * LDG + d]; }

// Keys and queries decayed from the chunk's start and to its end, in memory; then put(r, c, of_row(r), {of_column(c),
// of_column(c + 1)}, pair, pair) for all pairs of neighbours of the products of those decayed to one another.
template <class R, class S, class F>
DEV void decayed_products(Shared& shared, Decays, const Args& args, i64 place, R of_row, S of_column, F put) {
  FOR_EACH(i, 2 * C) {
    const int r = i % C;
    const float norm = args.flags & L2NORM ? rsqrt_(1e-6f + row_square(i < C ? shared.q : shared.k, r)) : 1.f;
    (i < C ? shared.q_norm : shared.k_norm)[r] = norm;
  }
  // the runs of gates follow one another
  FOR_EACH(i, C / 16 * K) {
    const int d = i % K, run = i / K * 16;
    float before = 0.f;
    for (int j = d; j < i; j += K) before += shared.run_sums[j];
    for (int r = 0; r < 16; r++) shared.G[(run + r) * LDG + d] += before;
  }
  sync();
  FOR_EACH(i, C * K / 8) {
    const Place p = image_place<C, K>(i);
    const float *G = shared.G + p.row * LDG + p.column, *last = shared.G + (C - 1) * LDG + p.column;
    const float k_norm = shared.k_norm[p.row], q_norm = args.scale * shared.q_norm[p.row];
    float k_in[8], k_out[8], q_in[8];
    for (int e = 0; e < 8; e++) {
      const float in = exp_(G[e]), k = shared.k.get(p.row, p.column + e) * k_norm;
      k_out[e] = k * exp_(last[e] - G[e]);
      q_in[e] = shared.q.get(p.row, p.column + e) * q_norm * in;
      k_in[e] = k * in;
    }
    store_eight(args.ws_k_in, place * C * K / 8 + i, k_in);
    store_eight(args.ws_k_out, place * C * K / 8 + i, k_out);
    store_eight(args.ws_q_in, place * C * K / 8 + i, q_in);
  }
  decayed_gram(shared.QK, shared.KK, shared.q, shared.k, shared.G);
  sync();
  FOR_EACH(i, C * C / 2) {
    const int r = i / (C / 2), c = i % (C / 2) * 2;
    const decltype(of_column(0)) columns[2] = {of_column(c), of_column(c + 1)};
    put(r, c, of_row(r), columns, shared.QK + r * LD + c, shared.KK + r * LD + c);
  }
}

extern "C" __global__ WORKGROUP void kda_prepare_bf16_k128_v128(const Args args) {
  __shared__ Shared shared;

  // ---- the chunk and the head
  const int slot = block_id() / args.value_heads, value_head = block_id() % args.value_heads;
  const int head = value_head * args.heads / args.value_heads;
  const Sequence sequence = sequence_of_slot(args, slot);
  const int first = (slot - sequence.slot) * C;
  const int rows = sequence.length - first < C ? sequence.length - first : C;
  if (rows <= 0) return;
  const i64 token = sequence.start + first;
  const number* q = rows_of((const number*)args.q, sequence.batch, token, head, args.q_stride_b, args.q_stride_t, args.q_stride_h);
  const number* k = rows_of((const number*)args.k, sequence.batch, token, head, args.k_stride_b, args.k_stride_t, args.k_stride_h);

  // ---- the tiles; meanwhile the gates
  const i64 place = block_id();
  load_tile(shared.q, q, args.q_stride_t, args.q_stride_d, rows);
  load_tile(shared.k, k, args.k_stride_t, args.k_stride_d, rows);
  const i64 beta = sequence.batch * args.beta_stride_b + token * args.beta_stride_t + value_head * args.beta_stride_h;
  FOR_ROWS(r) shared.beta[0][r] = r < rows ? beta_of(args, load_number(args.beta, beta + r * args.beta_stride_t, args.beta_type)) : 0.f;
  const i64 g = sequence.batch * args.g_stride_b + token * args.g_stride_t + value_head * args.g_stride_h;
  const Decays decays = take_gates(shared, args, g, rows, value_head);
  sync_tiles();

  // ---- keys and queries decayed from the chunk's start (they meet the state) and to its end (they go into it), and from
  //      the products of those decayed to one another P and L
  decayed_products(
      shared, decays, args, place,
      [&](int r) { return Row{args.scale * shared.q_norm[r], shared.beta[0][r] * shared.k_norm[r]}; },
      [&](int c) { return Column{shared.k_norm[c]}; },
      [&](int r, int c, Row row, const Column* column, const float* qk, const float* kk) {
        float p[2], l[2];
        for (int e = 0; e < 2; e++) {
          const float q_factor = row.scale * column[e].norm, k_factor = row.beta * column[e].norm;
          p[e] = c + e <= r ? q_factor * qk[e] : 0.f;
          l[e] = c + e < r ? k_factor * kk[e] : 0.f;
        }
        put_lower(shared, 0, r, c, l);
        store_pair(args.ws_p, place * C * C / 2 + image_pair<C, C>(r, c), p[0], p[1]);
      });
  FOR_EACH(d, K) put_row(args.ws_rows, place, DECAY, row_place<K>(d), exp_(sum_of_gates(shared, d)));
  sync();

  // ---- A = (I + L)⁻¹ diag(b)
  store_inverses(shared, 1, args.ws_a, place);
}
static_assert(sizeof(Shared) <= 106496, "more LDS than the launch was told");
