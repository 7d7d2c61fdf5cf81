// gated_delta_rule_prepare_bf16_k128_v128 for sm_90a: per chunk: gate sums, Gram products, triangular inverse.
// Rendered by qla-codegen. Build:
//   nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o gated_delta_rule_prepare_bf16_k128_v128.cubin gated_delta_rule_prepare_bf16_k128_v128.cu

#define DEV __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 number;  // bf16

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// ---- arguments: one block; strides in elements
struct Args {
  void* q;
  void* k;
  void* cu_seqlens;
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

constexpr int THREADS = 128;
DEV int thread_id() { return threadIdx.x; }
DEV int block_id() { return blockIdx.x; }
DEV void sync() { __syncthreads(); }

DEV u16 to_number(float x) { return (u16)pack(x, 0.f); }
DEV float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
DEV float from_fp16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
DEV float to_float(u16 x) { return from_bf16(x); }
DEV float exp_(float x) { return __expf(x); }
DEV float log1p_(float x) { return log1pf(x); }
DEV float rsqrt_(float x) { return rsqrtf(x); }

#define FOR_EACH(i, n) for (int i = thread_id(); i < (n); i += THREADS)
constexpr int TEAMS = THREADS / 32;  // of a warp
// Turned by the workgroup, so that few teams at work do not all sit on the same quarter of a multiprocessor.
DEV int team() { return ((threadIdx.x >> 5) + blockIdx.x) % TEAMS; }
#define FOR_TEAM(i, n) for (int i = threadIdx.x & 31; i < (n); i += 32)
DEV void sync_team() { __syncwarp(); }
// A lower triangular matrix: the blocks of 16 on and below its diagonal, block row after block row, rows of 20 floats.
constexpr int LOWER = (C / 16) * (C / 16 + 1) / 2 * 320;
DEV int lower_at(int r, int c) { return ((r >> 4) * ((r >> 4) + 1) / 2 + (c >> 4)) * 320 + (r & 15) * 20 + (c & 15); }

// ---- tiles in shared memory
struct __align__(16) Eight { u32 x[4]; };
// Byte of element (row, column) of a tile of `rows` rows: boxes of 64 columns, 16-byte pieces exchanged by row.
DEV u32 tile_offset(int rows, int row, int column) {
  return (column >> 6) * rows * 128 + row * 128 + ((((column >> 3) & 7) ^ (row & 7)) << 4) + (column & 7) * 2;
}
template <int ROWS, int COLUMNS>
struct __align__(1024) SharedTile {
  number x[ROWS * COLUMNS];
  DEV number& at(int row, int column) { return *(number*)((char*)x + tile_offset(ROWS, row, column)); }
};
// Rows of a tensor into a tile, waited for in sync_tiles; rows at and after `rows` become zero.
template <int COLUMNS>
DEV void load_tile(SharedTile<C, COLUMNS>& to, const number* from, i64 stride_t, i64, int rows) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through a loop around this in registers
#pragma unroll
  for (int n = 0; n < C * COLUMNS / 8 / THREADS; n++) {
    const int i = thread + n * THREADS, row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, bytes = row < rows ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(&to.at(row, column))), "l"(row < rows ? from + row * stride_t + column : from), "r"(bytes)
                 : "memory");
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
// The tensor cores read what plain stores and copies wrote.
DEV void sync_tiles() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}

// ---- tiles in memory are images of tiles in shared memory: piece i of one holds eight neighbours from (row, column) on
struct Place { int row, column; };
template <int ROWS, int COLUMNS> DEV Place image_place(int i) {
  const int row = i / 8 % ROWS;
  return {row, i / (8 * ROWS) * 64 + ((i & 7) ^ (row & 7)) * 8};
}
DEV void store_eight(void* to, i64 i, const float* x) {
  ((uint4*)to)[i] = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
template <int ROWS, int COLUMNS> DEV int image_pair(int row, int column) { return tile_offset(ROWS, row, column) / 4; }
DEV void store_pair(void* to, i64 i, float lo, float hi) { ((u32*)to)[i] = pack(lo, hi); }
// Row vectors in the order of wgmma's accumulator columns: a lane's numbers side by side.
template <int ROWS> DEV int row_place(int r) { return (r >> 1 & 3) * (ROWS / 4) + (r >> 3) * 2 + (r & 1); }

// ---- Gram products: [C, C] = a bᵀ, on the tensor cores, in registers
struct Square { float x[32]; };
// How wgmma finds a tile: boxes are `leading` bytes apart, groups of eight rows 1024.
DEV u64 descriptor(u32 address, u32 leading) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
// d[64][64] += a[64][16] b[64][16]ᵀ.
DEV void wgmma(float* d, u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
               "%32, %33, 1, 1, 1, 0, 0;\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b));
}
DEV Square gram(SharedTile<C, K>& a, SharedTile<C, K>& b) {
  Square s;
  const u64 from_a = descriptor(shared_address(a.x), 16), from_b = descriptor(shared_address(b.x), 16);
#pragma unroll
  for (int i = 0; i < 32; i++) s.x[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(s.x[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    const int at = (k >> 2) * (C * 128 >> 4) + 2 * (k & 3);
    wgmma(s.x, from_a + at, from_b + at);
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(s.x[i])::"memory");
  return s;
}
// Calls f(r, c, row(r), {column(c), column(c + 1)}, a's pair, b's pair) for the pairs of neighbours that this lane holds
// of two products: two rows of 16 columns.
template <class R, class S, class F> DEV void for_pairs(const Square& a, const Square& b, R row, S column, F f) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through a loop around this in registers
  const int r = (thread >> 5) * 16 + ((thread & 31) >> 2), c = (thread & 3) * 2;
  const decltype(row(0)) rows[2] = {row(r), row(r + 8)};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const decltype(column(0)) columns[2] = {column(8 * j + c), column(8 * j + c + 1)};
    f(r, 8 * j + c, rows[0], columns, a.x + 4 * j, b.x + 4 * j);
    f(r + 8, 8 * j + c, rows[1], columns, a.x + 4 * j + 2, b.x + 4 * j + 2);
  }
}
// Gates become their sums from the start on; `rest` the sums of those after each.
DEV void sum_gates(float* G, float* rest) {
  const int lane = threadIdx.x & 31;
  float low = G[lane], high = G[lane + 32];
  float after_low = __shfl_down_sync(~0u, low, 1), after_high = __shfl_down_sync(~0u, high, 1);
  if (lane == 31) after_low = after_high = 0.f;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float l = __shfl_up_sync(~0u, low, d), h = __shfl_up_sync(~0u, high, d);
    const float al = __shfl_down_sync(~0u, after_low, d), ah = __shfl_down_sync(~0u, after_high, d);
    if (lane >= d) low += l, high += h;
    if (lane + d < 32) after_low += al, after_high += ah;
  }
  rest[lane] = after_low + __shfl_sync(~0u, high, 31);
  rest[lane + 32] = after_high;
  G[lane] = low;
  G[lane + 32] = high + __shfl_sync(~0u, low, 31);
  __syncwarp();
}

// ---- x (strictly lower) becomes (I + x)⁻¹, by one warp: blocks of 16 by substitution, then block rows from the last up,
//      X_ij = -(X_ii L_ij + … + X_i,j+1 L_j+1,j) X_jj on the tensor cores, in tf32 with the operands' rests added
struct Tf32 { u32 high, rest; };
DEV Tf32 tf32(float x) {
  const u32 high = __float_as_uint(x) & 0xFFFFE000;  // the tensor cores read no more of it
  return {high, __float_as_uint(x - __uint_as_float(high))};
}
DEV void mma_tf32(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d[16][16] += a b: `a` as this lane's numbers of an accumulator (n-tile, number), b a block in shared memory. The inner
// index runs in the accumulator's order, even numbers before odd ones, on both sides.
DEV void multiply_blocks(float (&d)[2][4], const float (&a)[2][4], const float* b) {
  const int row = (threadIdx.x & 3) * 2, column = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const Tf32 a0 = tf32(a[k][0]), a1 = tf32(a[k][2]), a2 = tf32(a[k][1]), a3 = tf32(a[k][3]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const Tf32 b0 = tf32(b[(8 * k + row) * 20 + 8 * n + column]), b1 = tf32(b[(8 * k + row + 1) * 20 + 8 * n + column]);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
      mma_tf32(d[n], a0.rest, a1.rest, a2.rest, a3.rest, b0.high, b1.high);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.rest, b1.rest);
    }
  }
}
// Where number e of this lane's part of an accumulator belongs in a block.
DEV int number_at(int e) {
  const int row = (threadIdx.x & 31) >> 2, column = (threadIdx.x & 3) * 2;
  return (row + (e >> 1 & 1) * 8) * 20 + (e >> 2) * 8 + column + (e & 1);
}
DEV void solve_unit_lower(float* x) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    float* block = x + lower_at(16 * (lane >> 4) + 32 * half, 16 * (lane >> 4) + 32 * half);
    float y[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float sums[4] = {i == (lane & 15) ? 1.f : 0.f};
#pragma unroll
      for (int m = 0; m < i; m++) sums[m & 3] -= block[i * 20 + m] * y[m];
      y[i] = sums[0] + sums[1] + (sums[2] + sums[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i++) block[i * 20 + (lane & 15)] = y[i];
    __syncwarp();
  }
#pragma unroll
  for (int i = C / 16 - 1; i > 0; i--) {
    float done[C / 16][2][4];  // X_ij of this block row
#pragma unroll
    for (int j = i; j >= 0; j--) {
      float* block = x + lower_at(16 * i, 16 * j);
      if (j < i) {
        float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
        for (int m = i; m > j; m--) multiply_blocks(sum, done[m], x + lower_at(16 * m, 16 * j));
        multiply_blocks(product, sum, x + lower_at(16 * j, 16 * j));
        __syncwarp();  // every lane has read L_ij
#pragma unroll
        for (int e = 0; e < 8; e++) block[number_at(e)] = done[j][e >> 2][e & 3] = -product[e >> 2][e & 3];
      } else {
#pragma unroll
        for (int e = 0; e < 8; e++) done[j][e >> 2][e & 3] = block[number_at(e)];
      }
    }
  }
  __syncwarp();
}

// ---- numbers whose type the caller chose: 0 float, 1 bf16, 2 fp16
DEV float load_number(const void* p, i64 at, int type) {
  return type == 0 ? ((const float*)p)[at] : type == 1 ? from_bf16(((const u16*)p)[at]) : from_fp16(((const u16*)p)[at]);
}
constexpr int L2NORM = 1, BETA_SIGMOID = 2, BETA_DOUBLE = 4, GATE_IN_KERNEL = 8, LOWER_BOUND = 16;  // flags
DEV float beta_of(const Args& args, i64 at) {
  float x = load_number(args.beta, at, args.beta_type);
  if (args.flags & BETA_SIGMOID) x = 1.f / (1.f + exp_(-x));
  return args.flags & BETA_DOUBLE ? 2.f * x : x;
}

// ---- the record of a (chunk, value head): bytes of its vectors
constexpr int RECORD = 528, MINUS_IN = 0, LEFT = 128, OUT = 256, DECAY = 512;
DEV void put_row(void* rows, i64 place, int vector, int at, float x) {
  *(float*)((char*)rows + place * RECORD + vector + 4 * at) = x;
}
DEV void put_half_row(void* rows, i64 place, int vector, int at, float x) {
  *(number*)((char*)rows + place * RECORD + vector + sizeof(number) * at) = to_number(x);
}

// ---- what the threads of a workgroup share
struct Shared {
  union {
    struct { SharedTile<C, K> q, k; };  // tokens of the chunk, zero after the sequence's end
    alignas(16) float L[TEAMS][LOWER];  // once their products are known
  };
  alignas(16) float G[TEAMS][C], rest[TEAMS][C], beta[TEAMS][C];
  float q_norm[C], k_norm[C];
};
struct alignas(16) EightFloats { float x[8]; };
// What P and L take from a row and a column.
struct Row { float G, scale, beta; };
struct Column { float G, norm; };

// Slot of a chunk -> its sequence: the last one whose first slot is not after it.
DEV Sequence sequence_of_slot(const Args& args, int slot) {
  if (!args.has_cu_seqlens) return sequence_at(args, slot / ((args.tokens + C - 1) / C));
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

extern "C" __global__ void __launch_bounds__(THREADS, 3) gated_delta_rule_prepare_bf16_k128_v128(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *(Shared*)shared_memory;

  // ---- the chunk and the heads of its group
  const int slot = block_id() / args.heads, head = block_id() % args.heads, group = args.value_heads / args.heads;
  const Sequence sequence = sequence_of_slot(args, slot);
  const int first = (slot - sequence.slot) * C;
  const int rows = sequence.length - first < C ? sequence.length - first : C;
  if (rows <= 0) return;
  const i64 token = sequence.start + first;
  const number* q = rows_of((const number*)args.q, sequence.batch, token, head, args.q_stride_b, args.q_stride_t, args.q_stride_h);
  const number* k = rows_of((const number*)args.k, sequence.batch, token, head, args.k_stride_b, args.k_stride_t, args.k_stride_h);

  for (int base = head * group; base < (head + 1) * group; base += TEAMS) {
    const int count = (head + 1) * group - base < TEAMS ? (head + 1) * group - base : TEAMS;
    const int value_head = base + team();
    const i64 place = (i64)slot * args.value_heads + value_head;
    float *const G = shared.G[team()], *const rest = shared.rest[team()];

    // ---- the tiles; meanwhile, a team to a value head, G = sums of the gates from the chunk's start, `rest` those to
    //      its end
    load_tile(shared.q, q, args.q_stride_t, args.q_stride_d, rows);
    load_tile(shared.k, k, args.k_stride_t, args.k_stride_d, rows);
    if (team() < count) {
      const i64 beta = sequence.batch * args.beta_stride_b + token * args.beta_stride_t + value_head * args.beta_stride_h;
      const i64 g = sequence.batch * args.g_stride_b + token * args.g_stride_t + value_head * args.g_stride_h;
      FOR_TEAM(r, C) {
        shared.beta[team()][r] = r < rows ? beta_of(args, beta + r * args.beta_stride_t) : 0.f;
        G[r] = r < rows ? gate_of(args, load_number(args.g, g + r * args.g_stride_t, args.g_type), value_head, value_head) : 0.f;
      }
      sync_team();
      sum_gates(G, rest);
    }
    sync_tiles();
    FOR_EACH(i, 2 * C) {
      const int r = i % C;
      const float norm = args.flags & L2NORM ? rsqrt_(1e-6f + row_square(i < C ? shared.q : shared.k, r)) : 1.f;
      (i < C ? shared.q_norm : shared.k_norm)[r] = norm;
    }
    sync();

    // ---- K Kᵀ and Q Kᵀ, once for these heads
    const Square QK = gram(shared.q, shared.k), KK = gram(shared.k, shared.k);

    // ---- the factors of the chain's rows
    if (team() < count) {
      FOR_TEAM(r, C) {
        const float in = exp_(G[r]);
        put_half_row(args.ws_rows, place, MINUS_IN, row_place<C>(r), -in * shared.k_norm[r]);
        put_half_row(args.ws_rows, place, LEFT, row_place<C>(r), exp_(rest[r]) * shared.k_norm[r]);
        put_row(args.ws_rows, place, OUT, row_place<C>(r), args.scale * in * shared.q_norm[r]);
        if (r == C - 1) put_row(args.ws_rows, place, DECAY, 0, in);
      }
    }
    sync();

    // ---- P and L of these heads
    for (int t = 0; t < count; t++) {
      const i64 place = (i64)slot * args.value_heads + base + t;
      for_pairs(
          QK, KK,
          [&](int r) { return Row{shared.G[t][r], args.scale * shared.q_norm[r], shared.beta[t][r] * shared.k_norm[r]}; },
          [&](int c) { return Column{shared.G[t][c], shared.k_norm[c]}; },
          [&](int r, int c, Row row, const Column* column, const float* qk, const float* kk) {
            float p[2];
            for (int e = 0; e < 2; e++) {
              const float factor = column[e].norm * exp_(row.G - column[e].G);
              p[e] = c + e <= r ? row.scale * factor * qk[e] : 0.f;
              if (c / 16 <= r / 16) shared.L[t][lower_at(r, c) + e] = c + e < r ? row.beta * factor * kk[e] : 0.f;
            }
            store_pair(args.ws_p, place * C * C / 2 + image_pair<C, C>(r, c), p[0], p[1]);
          });
    }
    sync();

    // ---- A = (I + L)⁻¹ diag(b), a head to a team
    if (team() < count) {
      solve_unit_lower(shared.L[team()]);
      FOR_TEAM(i, C * C / 8) {
        const Place p = image_place<C, C>(i);
        EightFloats x = {};  // no block above the diagonal is kept
        if (p.column / 16 <= p.row / 16) x = *(const EightFloats*)(shared.L[team()] + lower_at(p.row, p.column));
        const EightFloats beta = *(const EightFloats*)(shared.beta[team()] + p.column);
        float a[8];
        for (int e = 0; e < 8; e++) a[e] = p.column + e <= p.row ? x.x[e] * beta.x[e] : 0.f;
        store_eight(args.ws_a, place * C * C / 8 + i, a);
      }
    }
    sync();
  }
}
static_assert(sizeof(Shared) == 55296, "what the launch provides");
