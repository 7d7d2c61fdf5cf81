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

struct alignas(8) TwoFloats { float x[2]; };
struct alignas(16) EightFloats { float x[8]; };

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
DEV float exp2_(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
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
  constexpr int ROWS = THREADS / (COLUMNS / 8);  // a multiple of eight
  const int first = thread / (COLUMNS / 8), column = thread % (COLUMNS / 8) * 8;
  const u32 at = shared_address(to.x) + tile_offset(C, first, column);
  from += first * stride_t + column;
#pragma unroll
  for (int r = 0; r < C; r += ROWS) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(at + r * 128), "l"(from), "r"(first + r < rows ? 16 : 0) : "memory");
    from += ROWS * stride_t;
  }
}
DEV void sync_tiles() {
  asm volatile("cp.async.wait_all;" ::: "memory");
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

// ---- products of 16 rows (a) with 8 (b), 16 channels at a time
DEV void mma(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four matrices of eight rows of 16 bytes; lanes 8 m … 8 m + 7 say where the rows of matrix m lie.
DEV void load_matrices(u32* x, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
// This lane's row for 32 channels of eight rows (b, two steps), and for 16 channels of eight rows of q, then of k (a).
DEV u32 keys_at(u32 tile, int row, int lane = threadIdx.x & 31) {
  const int piece = lane >> 3;
  return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}
DEV u32 rows_at(u32 q, u32 k, int row, int lane = threadIdx.x & 31) {
  const int piece = lane >> 4;
  return (lane & 8 ? k : q) + row * 128 + ((piece ^ (row & 7)) << 4);
}

// ---- products of the pairs of rows c <= r, in squares of eight rows and columns, nine for each warp: warp w has those of
//      the rows of blocks w and 7 - w, first the latter's
struct Products {
  float x[9][4];  // q k of two neighbours, then k k
  int thread;     // addresses are made from it: once for all heads, and not carried through all of the kernel
  DEV int warp() const { return thread >> 5; }
  DEV int row() const { return (thread & 31) >> 2; }
  DEV int column() const { return (thread & 3) * 2; }
  DEV bool late(int s) const { return s < 5 || (s < 8 && s <= 7 - warp()); }
  DEV int row_block(int s) const { return late(s) ? 7 - warp() : warp(); }
  DEV int column_block(int s) const { return late(s) ? s : 8 - s; }
  DEV bool on_diagonal(int s) const { return s > 3 && row_block(s) == column_block(s); }
};
// Also 1 / ‖x‖ of the rows, 1 unless `wanted`.
DEV Products gram(SharedTile<C, K>& q, SharedTile<C, K>& k, bool wanted, float* q_norm, float* k_norm) {
  Products p;
  p.thread = threadIdx.x;
  asm volatile("" : "+r"(p.thread));
  p.thread &= THREADS - 1;
  const int lane = p.thread & 31;
  const u32 from_q = shared_address(q.x), from_k = shared_address(k.x);
  const u32 rows = rows_at(from_q, from_k, lane & 7, lane), keys = keys_at(from_k, lane & 7, lane);
  const u32 late = rows + (7 - p.warp()) * 1024, early = rows + p.warp() * 1024;
#pragma unroll
  for (int s = 0; s < 9; s++)
#pragma unroll
    for (int e = 0; e < 4; e++) p.x[s][e] = 0.f;
#pragma unroll 1
  for (u32 box = 0; box < K / 64 * C * 128; box += C * 128)
#pragma unroll 1
  for (u32 turn = 0; turn < 128; turn += 64) {
    u32 a_late[2][4], a_early[2][4], first[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load_matrices(a_late[h], (late ^ turn ^ 32 * h) + box);
      load_matrices(a_early[h], (early ^ turn ^ 32 * h) + box);
    }
    load_matrices(first, (keys ^ turn) + box);
#pragma unroll
    for (int s = 0; s < 9; s++) {
      u32 b[4];
      if (s == 0 || s == 8) {
        mma(p.x[s], s ? a_early[0] : a_late[0], first);
        mma(p.x[s], s ? a_early[1] : a_late[1], first + 2);
        continue;
      }
      load_matrices(b, (keys ^ turn) + p.column_block(s) * 1024 + box);
      if (s < 5) {
        mma(p.x[s], a_late[0], b);
        mma(p.x[s], a_late[1], b + 2);
        continue;
      }
      u32 a[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++) load_matrices(a[h], (late ^ turn ^ 32 * h) + (p.row_block(s) - p.row_block(0)) * 1024 + box);
      mma(p.x[s], a[0], b);
      mma(p.x[s], a[1], b + 2);
    }
  }

  // The squares of rows are on the diagonal: those of k are there already.
  const bool mine = p.column() == (p.row() & 6), odd = p.row() & 1;
#pragma unroll
  for (int s = 4; s < 9; s++)
    if (mine && p.on_diagonal(s))
      k_norm[8 * p.row_block(s) + p.row()] = wanted ? rsqrt_(1e-6f + (odd ? p.x[s][3] : p.x[s][2])) : 1.f;
#pragma unroll 1
  for (int h = 0; h < 2; h++) {
    const int block = h ? p.warp() : 7 - p.warp();
    float squares[4] = {};
    if (wanted) {
      const u32 same = keys_at(from_q, lane & 7, lane) + block * 1024;
#pragma unroll
      for (int d = 0; d < K; d += 32) {
        const u32 turn = d & 32 ? 64 : 0, box = d / 64 * C * 128;
        u32 a[4], b[4];
        load_matrices(b, (same ^ turn) + box);
        load_matrices(a, ((rows + block * 1024) ^ turn) + box);
        mma(squares, a, b);
        load_matrices(a, ((rows + block * 1024) ^ turn ^ 32) + box);
        mma(squares, a, b + 2);
      }
    }
    if (mine) q_norm[8 * block + p.row()] = wanted ? rsqrt_(1e-6f + (odd ? squares[1] : squares[0])) : 1.f;
  }
  return p;
}
// Calls f(r, c, row(r), {column(c), column(c + 1)}, q k, k k, s) for the pairs of neighbours that this lane holds of the
// products: one of each square s.
template <class R, class S, class F> DEV void for_squares(Products& p, R row, S column, F f) {
  const decltype(row(0)) late = row(8 * (7 - p.warp()) + p.row()), early = row(8 * p.warp() + p.row());
  decltype(column(0)) columns[9][2];  // all read before f writes anything
#pragma unroll
  for (int s = 0; s < 9; s++)
#pragma unroll
    for (int e = 0; e < 2; e++) columns[s][e] = column(8 * p.column_block(s) + p.column() + e);
#pragma unroll
  for (int s = 0; s < 9; s++) {
    const int r = 8 * p.row_block(s) + p.row(), c = 8 * p.column_block(s) + p.column();
    if (s < 4) __builtin_assume(c + 1 < r);
    f(r, c, p.late(s) ? late : early, columns[s], p.x[s], p.x[s] + 2, s);
  }
}
template <class R, class S, class F> DEV void for_pairs(Products& p, R row, S column, F f) {
  for_squares(p, row, column, [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk, int) {
    f(r, c, of_row, columns, qk, kk);
  });
}

// ---- squares of 16-bit numbers, one number pair of each to a lane, become rows of 16 bytes
DEV void store_matrices(u32 address, const u32* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
               ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// Lane l gets row l / 4 of square l % 4 of four.
DEV uint4 turn_squares(uint4* room, int lane, const u32* x) {
  const int row = lane & 7, square = lane >> 3;
  __syncwarp();
  store_matrices(shared_address(room + row * 4 + (square ^ row >> 1)), x);
  __syncwarp();
  return room[lane ^ (lane >> 3 & 3)];
}
// P of a chunk, by its pairs f; zero above them.
template <class T, class R, class S, class F>
DEV void store_matrix(T& shared, void* to, i64 place, Products& products, R row, S column, F f) {
  u32 x[9];
  for_squares(products, row, column, [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk, int s) {
    const TwoFloats p = f(r, c, of_row, columns, qk, kk);
    x[s] = pack(p.x[0], p.x[1]);
  });
  char* image = (char*)to + place * C * C * 2;
  int thread = products.thread;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried from head to head in registers
  const int warp = products.warp(), lane = thread & 31, turned = thread & 3, r = products.row();
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const uint4 piece = turn_squares(shared.turned[warp], lane, x + 4 * n);
    const int s = 4 * n + turned;
    const bool late = n == 0 || s <= 7 - warp;
    const int block = late ? 7 - warp : warp, at = late ? s : 8 - s;
    *(uint4*)(image + (8 * block + r) * 128 + ((at ^ r) << 4)) = piece;
  }
  *(u32*)(image + tile_offset(C, 8 * warp + r, products.column())) = x[8];
#pragma unroll
  for (int i = 0; i < C * C / 8; i += THREADS) {
    const int at = i + thread;
    const Place p = image_place<C, C>(at);
    if (p.column > p.row) ((uint4*)image)[at] = make_uint4(0, 0, 0, 0);
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

// ---- x (strictly lower) becomes (I + x)⁻¹, by one warp or several: blocks of 16 by substitution, then block rows from the last up,
//      X_ij = -(X_ii L_ij + … + X_i,j+1 L_j+1,j) X_jj on the tensor cores, in tf32 with the operands' rests added
struct Tf32 { u32 high, rest; };
DEV Tf32 tf32(float x) {
  const u32 high = __float_as_uint(x) & 0xFFFFE000;  // the tensor cores read no more of x
  return {__float_as_uint(x), __float_as_uint(x - __uint_as_float(high))};
}
DEV void mma_tf32(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Where a lane's numbers of a block start, as an operand and as an accumulator.
DEV int operand_place(int lane) { return (lane & 3) * 40 + (lane >> 2); }
DEV int number_place(int lane) { return (lane >> 2) * 20 + (lane & 3) * 2; }
// d[16][16] += a b: `a` as this lane's numbers of an accumulator (n-tile, number), b a block in shared memory, from the
// lane's place on. The inner index runs in the accumulator's order, even numbers before odd ones, on both sides.
DEV void multiply_blocks(float (&d)[2][4], const float (&a)[2][4], const float* b) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const Tf32 a0 = tf32(a[k][0]), a1 = tf32(a[k][2]), a2 = tf32(a[k][1]), a3 = tf32(a[k][3]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const Tf32 b0 = tf32(b[8 * k * 20 + 8 * n]), b1 = tf32(b[(8 * k + 1) * 20 + 8 * n]);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
      mma_tf32(d[n], a0.rest, a1.rest, a2.rest, a3.rest, b0.high, b1.high);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.rest, b1.rest);
    }
  }
}
// Where number e of an accumulator belongs, from the lane's place on.
DEV constexpr int number_at(int e) { return (e >> 1 & 1) * 160 + (e >> 2) * 8 + (e & 1); }
DEV void invert_block(float* block, int column) {
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float sums[4] = {i == column ? 1.f : 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 row = *(const float4*)(block + i * 20 + m);
      sums[0] -= row.x * y[m];
      if (m + 1 < i) sums[1] -= row.y * y[m + 1];
      if (m + 2 < i) sums[2] -= row.z * y[m + 2];
      if (m + 3 < i) sums[3] -= row.w * y[m + 3];
    }
    y[i] = sums[0] + sums[1] + (sums[2] + sums[3]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; i++) block[i * 20 + column] = y[i];
}
// A of `count` heads, on as many teams each as there are for them: they share the block rows.
DEV void store_inverses(float (&L)[TEAMS][LOWER], float (&betas)[TEAMS][C], int count, void* to, i64 place) {
  const int shift = count > 2 ? 0 : 3 - count, parts = 1 << shift, item = team() >> shift, part = team() & (parts - 1);
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through all of the kernel in registers
  const int lane = thread & 31;
  float *const x = L[item], *const numbers = x + number_place(lane), *const spare = L[2] + team() * 512;  // where parts > 1, there are two matrices at most
  if (item < count) {
#pragma unroll 1
    for (int half = part; half < 2; half += parts) {
      const int block = 16 * (lane >> 4) + 32 * half;
      invert_block(x + lower_at(block, block), lane & 15);
    }
  }
  sync();
  if (item >= count) return;
  const float* const operands = x + operand_place(lane);
#pragma unroll
  for (int i = C / 16 - 1; i >= 0; i--) {
    const int owner = parts == 4 ? 3 - i : (i + 1) / 2 & (parts - 1);
    if (owner != part) continue;
    float done[C / 16][2][4];  // X_ij of this block row
#pragma unroll
    for (int j = i; j >= 0; j--) {
      if (j < i) {
        float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
        for (int m = i; m > j; m--) multiply_blocks(sum, done[m], operands + lower_at(16 * m, 16 * j));
        multiply_blocks(product, sum, operands + lower_at(16 * j, 16 * j));
#pragma unroll
        for (int e = 0; e < 8; e++) done[j][e >> 2][e & 3] = -product[e >> 2][e & 3];
      } else {
#pragma unroll
        for (int e = 0; e < 8; e++) done[j][e >> 2][e & 3] = numbers[lower_at(16 * i, 16 * i) + number_at(e)];
      }
    }
    __syncwarp();  // every lane has read L_ij

    // 16 rows of A, as they lie in memory, in place of the row's blocks
    uint4* const rows = (uint4*)(parts == 1 ? x + lower_at(16 * i, 0) : spare);
    const int row = lane & 15;
    const u32 at = shared_address(rows + row * 8 + (lane >> 4 ^ row & 7));
    if (parts > 1) __syncwarp();  // and what was in `spare`
#pragma unroll
    for (int j = 0; j <= i; j++) {
      u32 numbers[4];  // upper left, lower left, …
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const TwoFloats beta = *(const TwoFloats*)(betas[item] + 16 * j + 8 * n + (lane & 3) * 2);
#pragma unroll
        for (int h = 0; h < 2; h++) numbers[2 * n + h] = pack(done[j][n][2 * h] * beta.x[0], done[j][n][2 * h + 1] * beta.x[1]);
      }
      store_matrices(at ^ 32 * j, numbers);
    }
    __syncwarp();
    uint4* const image = (uint4*)to + (place + item) * C * C / 8 + 128 * i;
#pragma unroll
    for (int n = 0; n < 128; n += 32) {
      const Place p = image_place<C, C>(n + lane);
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (p.column < 16 * i + 16) piece = rows[n + lane];
      image[n + lane] = piece;
    }
  }
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
  uint4 turned[TEAMS][32];  // squares of P on their way to memory
  float q_norm[C], k_norm[C];
};

// What P and L take from a row and a column.
struct Row { float G, beta; };
struct Column { float G; };

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

extern "C" __global__ void __launch_bounds__(THREADS, 4) gated_delta_rule_prepare_bf16_k128_v128(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *(Shared*)shared_memory;

  // ---- the chunk and the heads of its group
  const unsigned group = (unsigned)args.value_heads / (unsigned)args.heads, passes = (group + TEAMS - 1) / TEAMS;
  const unsigned heads = args.heads * passes, at = block_id() % heads;
  const int slot = block_id() / heads, head = at / passes, base = head * group + at % passes * TEAMS;
  const int left = (head + 1) * (int)group - base, count = left < TEAMS ? left : TEAMS;
  const Sequence sequence = sequence_of_slot(args, slot);
  const int first = (slot - sequence.slot) * C;
  const int rows = sequence.length - first < C ? sequence.length - first : C;
  if (rows <= 0) return;
  const i64 token = sequence.start + first;
  const number* q = rows_of((const number*)args.q, sequence.batch, token, head, args.q_stride_b, args.q_stride_t, args.q_stride_h);
  const number* k = rows_of((const number*)args.k, sequence.batch, token, head, args.k_stride_b, args.k_stride_t, args.k_stride_h);

  const int value_head = base + team();
  const i64 place = (i64)slot * args.value_heads + value_head;
  float *const G = shared.G[team()], *const rest = shared.rest[team()];

  // ---- the tiles; meanwhile, a team to a value head, G = sums of the gates from the chunk's start, `rest` those to
  //      its end, as logarithms to the base 2
  load_tile(shared.q, q, args.q_stride_t, args.q_stride_d, rows);
  load_tile(shared.k, k, args.k_stride_t, args.k_stride_d, rows);
  if (team() < count) {
    const i64 beta = sequence.batch * args.beta_stride_b + token * args.beta_stride_t + value_head * args.beta_stride_h;
    const i64 g = sequence.batch * args.g_stride_b + token * args.g_stride_t + value_head * args.g_stride_h;
    FOR_TEAM(r, C) {
      shared.beta[team()][r] = r < rows ? beta_of(args, beta + r * args.beta_stride_t) : 0.f;
      G[r] = r < rows ? 1.44269504f * gate_of(args, load_number(args.g, g + r * args.g_stride_t, args.g_type), value_head, value_head) : 0.f;
    }
    sync_team();
    sum_gates(G, rest);
  }
  sync_tiles();

  // ---- Q Kᵀ and K Kᵀ, once for these heads, and 1 / ‖q‖ and 1 / ‖k‖, which are folded into them
  Products products = gram(shared.q, shared.k, args.flags & L2NORM, shared.q_norm, shared.k_norm);
  sync();
  for_pairs(
      products,
      [&](int r) { return TwoFloats{args.scale * shared.q_norm[r], shared.k_norm[r]}; },
      [&](int c) { return shared.k_norm[c]; },
      [&](int, int, TwoFloats row, const float* column, float* qk, float* kk) {
        for (int e = 0; e < 2; e++) {
          qk[e] *= row.x[0] * column[e];
          kk[e] *= row.x[1] * column[e];
        }
      });

  // ---- the factors of the chain's rows
  if (team() < count) {
    FOR_TEAM(r, C) {
      const float in = exp2_(G[r]);
      put_half_row(args.ws_rows, place, MINUS_IN, row_place<C>(r), -in * shared.k_norm[r]);
      put_half_row(args.ws_rows, place, LEFT, row_place<C>(r), exp2_(rest[r]) * shared.k_norm[r]);
      put_row(args.ws_rows, place, OUT, row_place<C>(r), args.scale * in * shared.q_norm[r]);
      if (r == C - 1) put_row(args.ws_rows, place, DECAY, 0, in);
    }
  }

  // ---- P and L of these heads
  const i64 first_place = (i64)slot * args.value_heads + base;
  for (int t = 0; t < count; t++) {
    store_matrix(
        shared, args.ws_p, first_place + t, products,
        [&](int r) { return Row{shared.G[t][r], shared.beta[t][r]}; },
        [&](int c) { return Column{shared.G[t][c]}; },
        [&](int r, int c, Row row, const Column* column, const float* qk, const float* kk) {
          float p[2], l[2];
          for (int e = 0; e < 2; e++) {
            const float decay = exp2_(row.G - column[e].G), q_factor = decay, k_factor = row.beta * decay;
            p[e] = c + e <= r ? q_factor * qk[e] : 0.f;
            l[e] = c + e < r ? k_factor * kk[e] : 0.f;
          }
          *(TwoFloats*)(shared.L[t] + lower_at(r, c)) = TwoFloats{l[0], l[1]};
          return TwoFloats{p[0], p[1]};
        });
  }
  sync();

  // ---- A = (I + L)⁻¹ diag(b)
  store_inverses(shared.L, shared.beta, count, args.ws_a, first_place);
}
static_assert(sizeof(Shared) == 57344, "what the launch provides");
