// gated_delta_rule_prepare_bf16_k128_v128 for sm_90a: per chunk: gate sums, Gram products, triangular inverse.
// Rendered by qla-codegen. Build:
//   nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o gated_delta_rule_prepare_bf16_k128_v128.cubin gated_delta_rule_prepare_bf16_k128_v128.cu

#define DEV __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 number;  // bf16
struct __align__(64) CUtensorMap { u64 opaque[16]; };

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// ---- arguments: one block; strides in elements
struct Args {
  CUtensorMap q_map;
  CUtensorMap k_map;
  void* cu_seqlens;
  void* ws_a;
  void* ws_p;
  void* ws_rows;
  void* g;
  void* A_log;
  void* dt_bias;
  void* beta;
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
  int items;
  int heads_at_once;
  int group;
  int passes;
  int stride;
  int apart;
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

struct alignas(8) TwoFloats { float x[2]; };

// What a workgroup does at a time: a chunk, which has `rows` rows from `token` on, and value heads `base` … base + count - 1,
// which share `head` of q and k.
struct Item { int slot, batch, token, rows, head, base, count; };

constexpr int THREADS = 128;
DEV int thread_id() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // what follows from it is made where it is used, not carried from item to item in registers
  return thread;
}
DEV void sync() { __syncthreads(); }

DEV u16 to_number(float x) { return (u16)pack(x, 0.f); }
DEV float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }
DEV float from_fp16(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
DEV float exp_(float x) { return __expf(x); }
DEV float exp2_(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEV float log2_(float x) { return __log2f(x); }
DEV float sum_team(float x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
DEV float log1p_(float x) { return log1pf(x); }
DEV float rsqrt_(float x) { return rsqrtf(x); }
constexpr int TEAMS = THREADS / 32;  // of a warp
DEV int team() { return thread_id() >> 5; }
#define FOR_TEAM(i, n) _Pragma("unroll 1") for (int i = thread_id() & 31; i < (n); i += 32)
DEV void sync_team() { __syncwarp(); }
template <int N> struct Number { static constexpr int value = N; };
// Bytes of a matrix that is inverted.
constexpr int MATRIX = 10 * 1024;
constexpr int ROOM = 2 * 1024;  // bytes of 16 rows of an image

// ---- tiles in shared memory
// Byte of element (row, column) of a tile of `rows` rows: boxes of 64 columns, 16-byte pieces exchanged by row.
DEV u32 tile_offset(int rows, int row, int column) {
  return (column >> 6) * rows * 128 + row * 128 + ((((column >> 3) & 7) ^ (row & 7)) << 4) + (column & 7) * 2;
}
template <int ROWS, int COLUMNS>
struct __align__(1024) SharedTile {
  number x[ROWS * COLUMNS];
  DEV number& at(int row, int column) { return *(number*)((char*)x + tile_offset(ROWS, row, column)); }
};
DEV void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEV void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Lanes may leave the loop one by one, and what follows is for whole warps.
DEV void barrier_wait(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra over;\nbra again;\nover:\n}"
               ::"r"(barrier), "r"(phase) : "memory");
  __syncwarp();
}
DEV void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Boxes of 64 columns and one chunk of tokens.
DEV void load_box(u32 to, const CUtensorMap& map, int column, int head, int token, int batch, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4, %5}], [%6];"
               ::"r"(to), "l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch), "r"(barrier) : "memory");
}
DEV void prefetch_box(const CUtensorMap& map, int column, int head, int token, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, { %1, %2, %3, %4}];"
               ::"l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch) : "memory");
}
DEV void sync_tiles() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads them
  __syncthreads();
}

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

// ---- blocks of 16 columns of 16-bit numbers, a pair of each square of eight to a lane, become rows
DEV void store_matrices(u32 address, const u32* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};"
               ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// This lane's row of block 0 of 16 rows of an image; those of block j are at `^ 32 * j`.
DEV u32 image_block(u32 image, int lane) { return image + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4); }
// From shared to global memory, by one lane, on its way; nothing may be written there before `stored`.
DEV void store_bulk(void* to, u32 from, int bytes) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if ((threadIdx.x & 31) == 0)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
DEV void stored() {
  if ((threadIdx.x & 31) == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();
}

// ---- (I + L)⁻¹ in blocks of 16, on the tensor cores: numbers are sums of two in bf16, which together have 16 bits. Blocks on
//      the diagonal are inverted by substitution, then X_ij = -(X_ii L_ij + … + X_i,j+1 L_j+1,j) X_jj, a row by one warp.
//      A matrix is in shared memory as the blocks on the diagonal, L in float, then X transposed as L; then L's blocks below the
//      diagonal, each of high parts and of rests. Rows of blocks are 32 bytes, whose halves change places every four rows. In the end the
//      image of A takes their place, from its last rows to its first: what it overwrites, rows before do not need.
DEV constexpr int below(int i, int j) { return (i == 1 ? 9 : 2 * i + j) * 1024; }
template <class T> DEV u32 matrix_of(T& shared, int head, bool apart) { return shared_address(shared.q.x) + (apart ? 4 * C * K : 0) + head * MATRIX; }
DEV u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEV float rest_of(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xFFFF0000); }
DEV u32 high_pair(float lo, float hi) { return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632); }
struct Split { u32 high[4], low[4]; };  // a block, as an operand
DEV Split split(const float* x) {
  Split s;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s.high[i] = high_pair(x[2 * i], x[2 * i + 1]);
    s.low[i] = pack_bf16(rest_of(x[2 * i]), rest_of(x[2 * i + 1]));
  }
  return s;
}
// Where this lane's row of a block is: of L, and of X.
DEV u32 lower_row(int lane) { return (lane & 15) * 32 + ((lane >> 4 ^ lane >> 2 & 1) << 4); }
DEV u32 inverse_row(int lane) { return (lane & 7) * 32 + (lane >> 4) * 256 + ((lane >> 3 & 1 ^ lane >> 2 & 1) << 4); }
DEV void put_block(u32 matrix, int i, int j, const float (&l)[4][2], int lane) {
  const Split s = split(l[0]);
  const u32 at = matrix + below(i, j) + lower_row(lane);
  store_matrices(at, s.high);
  store_matrices(at + 512, s.low);
}
DEV void put_diagonal(u32 matrix, int i, const float (&l)[4][2], int lane) {
  const u32 at = matrix + i * 1024 + (lane >> 2) * 64 + ((lane & 3) * 8 ^ (lane >> 3 & 3) << 4);
#pragma unroll
  for (int e = 0; e < 4; e++)
    asm volatile("st.shared.v2.f32 [%0], { %1, %2};" ::"r"((at ^ (e >> 1) * 32) + (e & 1) * 512), "f"(l[e][0]), "f"(l[e][1]) : "memory");
}
// Two blocks on the diagonal, half a warp and 1024 bytes to each.
DEV void invert_blocks(u32 blocks, int lane) {
  const int column = lane & 15;
  const u32 block = blocks + (lane >> 4) * 1024;
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float sums[4] = {i == column ? 1.f : 0.f};
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      float row[4];
      asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3}, [%4];"
                   : "=f"(row[0]), "=f"(row[1]), "=f"(row[2]), "=f"(row[3]) : "r"(block + i * 64 + ((m >> 2 ^ i >> 1 & 3) << 4)));
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (m + e < i) sums[e] -= row[e] * y[m + e];
    }
    y[i] = sums[0] + sums[1] + (sums[2] + sums[3]);
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const Split s = split(y + 8 * n);
    const u32 at = block + column * 32 + ((n ^ column >> 2 & 1) << 4);
    asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};" ::"r"(at), "r"(s.high[0]), "r"(s.high[1]), "r"(s.high[2]), "r"(s.high[3]) : "memory");
    asm volatile("st.shared.v4.b32 [%0], { %1, %2, %3, %4};" ::"r"(at + 512), "r"(s.low[0]), "r"(s.low[1]), "r"(s.low[2]), "r"(s.low[3]) : "memory");
  }
}
template <bool TURNED> DEV void load_block(u32* x, u32 at) {
  if constexpr (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
  else load_matrices(x, at);
}
template <bool TURNED> DEV Split load_split(u32 at) {
  Split s;
  load_block<TURNED>(s.high, at);
  load_block<TURNED>(s.low, at + 512);
  return s;
}
DEV void mma_bf16(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The small products in sums of their own: so a product waits for few others.
struct Sum { float high[8], low[8]; };
DEV void multiply_blocks(Sum& d, const Split& a, const Split& b) {
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d.low + 4 * n, a.low, b.high + 2 * n);
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d.high + 4 * n, a.high, b.high + 2 * n);
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d.low + 4 * n, a.high, b.low + 2 * n);
}
// Block row i of A = X diag(b), of which there are i + 1 blocks, from the diagonal to the left.
template <class G> DEV void make_row(u32 (&a)[4][4], int i, u32 matrix, const float* betas, int lane, G keep) {
  const u32 diagonal = matrix + inverse_row(lane), lower = matrix + lower_row(lane);
  Split x[3];  // X_i,i-t
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const int j = i - t;
    if (j < 0) break;
    float product[8];
    if (t == 0) {
      const Split s = x[0] = load_split<true>(diagonal + 1024 * i);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        product[2 * e] = __uint_as_float(s.high[e] << 16) + __uint_as_float(s.low[e] << 16);
        product[2 * e + 1] = __uint_as_float(s.high[e] & 0xFFFF0000) + __uint_as_float(s.low[e] & 0xFFFF0000);
      }
    } else {
      Sum sum = {}, with_diagonal = {};
#pragma unroll
      for (int m = 0; m < t; m++) multiply_blocks(sum, x[m], load_split<true>(lower + below(i - m, j)));
#pragma unroll
      for (int e = 0; e < 8; e++) product[e] = -sum.high[e] - sum.low[e];
      multiply_blocks(with_diagonal, split(product), load_split<false>(diagonal + 1024 * j));
#pragma unroll
      for (int e = 0; e < 8; e++) product[e] = with_diagonal.high[e] + with_diagonal.low[e];
      if (t < 3) x[t] = split(product);
    }
    keep(j, product);
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const TwoFloats beta = *(const TwoFloats*)(betas + 16 * j + 4 * (p & 2) + (lane & 3) * 2);
      a[t][p] = pack(product[2 * p] * beta.x[0], product[2 * p + 1] * beta.x[1]);
    }
  }
}
// A of `count` heads, as many teams to each as there are for it, which share its block rows.
template <class T> DEV void store_inverses(T& shared, int count, bool apart, const float (*beta)[C], void* to, i64 place) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through all of the kernel in registers
  const int lane = thread & 31;
  for (int n = team(); n < 2 * count; n += TEAMS) invert_blocks(matrix_of(shared, n >> 1, apart) + (n & 1) * 2048, lane);
  sync();
  const int shift = count > 2 ? 0 : 3 - count, parts = 1 << shift, item = team() >> shift, part = team() & (parts - 1);
  if (item >= count) return;
  const u32 matrix = matrix_of(shared, item, apart);
  char* image = (char*)to + (place + item) * C * C * 2;
#pragma unroll 1
  for (int i = 3 - part; i >= 0; i -= parts) {
    u32 a[4][4] = {};
    make_row(a, i, matrix, beta[item], lane, [&](int, const float*) {});
    // all have read what the image takes the place of
    if (parts > 1) sync();
    else __syncwarp();
    const u32 at = image_block(matrix + 2048 * i, lane), zero[4] = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {  // not an address chosen: that would put the row into memory
      if (t <= i) store_matrices(at ^ 32 * (i - t), a[t]);
      else store_matrices(at ^ 32 * t, zero);
    }
    store_bulk(image + 2048 * i, matrix + 2048 * i, 2048);
  }
}

// ---- products of all pairs of rows: a lane has rows 16 warp + lane / 4 + 8 h and columns 8 j + 2 (lane % 4) + e of them,
//      as number 4 j + 2 h + e. Blocks of 16 columns after the warp's rows are of no use.
struct Products { float qk[C / 2], kk[C / 2]; };
// How wgmma finds a tile: boxes are `leading` bytes apart, groups of eight rows 1024.
DEV u64 descriptor(u32 address, u32 leading) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

// d[64][64] (+)= a[64][16] b[16][64], both from shared memory; `TRANSPOSED` reads b with its rows contiguous.
template <int TRANSPOSED> DEV void multiply_tiles(float (&d)[32], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, %35;\n}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
DEV void touch(float (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// 1 / ‖x‖ of this warp's rows from what is on the diagonals of blocks of eight, and ‖x‖² with that factor.
DEV void put_norms(float low, float high, bool wanted, float* to, float* squares, int lane) {
  const int row = lane >> 2;
  if ((row & 6) != 2 * (lane & 3)) return;
  const float low_norm = wanted ? rsqrt_(1e-6f + low) : 1.f, high_norm = wanted ? rsqrt_(1e-6f + high) : 1.f;
  to[row] = low_norm, to[row + 8] = high_norm;
  if (squares) squares[row] = low * low_norm * low_norm, squares[row + 8] = high * high_norm * high_norm;
}
// Those of a tile.
DEV void norms(u32 tile, bool wanted, float* to, int lane) {
  float low[4] = {}, high[4] = {};
  if (wanted) {
    const u32 rows = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int d = 0; d < K; d += 16) {
      u32 a[4];
      load_matrices(a, (rows ^ 2 * (d & 63)) + d / 64 * C * 128);
      const u32 b[2][2] = { {a[0], a[2]}, {a[1], a[3]} };  // the same rows as columns
      mma(low, a, b[0]);
      mma(high, a, b[1]);
    }
  }
  put_norms(lane & 4 ? low[1] : low[0], lane & 4 ? high[3] : high[2], wanted, to, nullptr, lane);
}
DEV void start_products(Products& p, SharedTile<C, K>& q, SharedTile<C, K>& k) {
  const u32 from_q = shared_address(q.x), from_k = shared_address(k.x);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int d = 0; d < K; d += 16) {
    const u32 step = d / 64 * C * 128 + 2 * (d & 63);
    multiply_tiles<0>(p.qk, descriptor(from_q + step, 16), descriptor(from_k + step, 16), d > 0);
    multiply_tiles<0>(p.kk, descriptor(from_k + step, 16), descriptor(from_k + step, 16), d > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
DEV void await_products(Products& p, SharedTile<C, K>& q, SharedTile<C, K>& k, bool wanted, float* q_norm, float* k_norm, float* k_square) {
  const int thread = thread_id(), warp = thread >> 5, lane = thread & 31;
  norms(shared_address(q.x) + warp * 2048, wanted, q_norm + 16 * warp, lane);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  touch(p.qk);
  touch(p.kk);
  // Squares of keys are on the diagonal.
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int b = 0; b < C / 16; b++)
    if (b == warp) low = lane & 4 ? p.kk[8 * b + 1] : p.kk[8 * b], high = lane & 4 ? p.kk[8 * b + 7] : p.kk[8 * b + 6];
  put_norms(low, high, wanted, k_norm + 16 * warp, k_square + 16 * warp, lane);
}
// Calls f(r, c, row(r), {column(c), column(c + 1)}, q k, k k, i) for this lane's pairs of neighbours of a block of 16 columns.
template <int BLOCK, class R, class S, class F> DEV void for_block(Products& p, const R (&rows)[2], S column, F f) {
  const int thread = thread_id(), lane = thread & 31, r = (thread >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int c = 16 * BLOCK + 8 * n + 2 * (lane & 3), at = 8 * BLOCK + 4 * n;
    const decltype(column(0)) columns[2] = {column(c), column(c + 1)};
#pragma unroll
    for (int h = 0; h < 2; h++) f(r + 8 * h, c, rows[h], columns, p.qk + at + 2 * h, p.kk + at + 2 * h, 2 * n + h);
  }
}

template <class R, class S, class F> DEV void for_pairs(Products& p, R row, S column, F f) {
  const int thread = thread_id(), warp = thread >> 5, r = warp * 16 + ((thread & 31) >> 2);
  const decltype(row(0)) rows[2] = {row(r), row(r + 8)};
  auto g = [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk, int) { f(r, c, of_row, columns, qk, kk); };
  for_block<0>(p, rows, column, g);
  if (warp > 0) for_block<1>(p, rows, column, g);
  if (warp > 1) for_block<2>(p, rows, column, g);
  if (warp > 2) for_block<3>(p, rows, column, g);
}

// P of a chunk, and L, by their pairs f(r, c, row(r), {column(c), column(c + 1)}, q k, k k).
template <class T, class R, class S, class F>
DEV void store_matrix(T& shared, int head, bool apart, void* to, i64 place, Products& products, R row, S column, F f) {
  const int thread = thread_id(), warp = thread >> 5, lane = thread & 31, r = warp * 16 + (lane >> 2);
  const decltype(row(0)) rows[2] = {row(r), row(r + 8)};
  const u32 room = shared_address(shared.room[warp]), lower = matrix_of(shared, head, apart);
  const u32 at = image_block(room, lane);
  stored();
  auto block = [&](auto number, auto whole) {
    constexpr int BLOCK = number.value;
    u32 p[4];
    float l[4][2];
    for_block<BLOCK>(products, rows, column, [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk, int i) {
      if (whole.value) __builtin_assume(c + 1 < r);
      const auto pair = f(r, c, of_row, columns, qk, kk);
      p[i] = pack(pair.p[0], pair.p[1]);
      l[i][0] = pair.l[0], l[i][1] = pair.l[1];
    });
    store_matrices(at ^ 32 * BLOCK, p);
    if (whole.value) put_block(lower, warp, BLOCK, l, lane);
    else put_diagonal(lower, warp, l, lane);
  };
  if (warp > 0) block(Number<0>(), Number<1>());
  else block(Number<0>(), Number<0>());
  if (warp > 1) block(Number<1>(), Number<1>());
  else if (warp == 1) block(Number<1>(), Number<0>());
  if (warp > 2) block(Number<2>(), Number<1>());
  else if (warp == 2) block(Number<2>(), Number<0>());
  if (warp == 3) block(Number<3>(), Number<0>());
  store_bulk((char*)to + place * C * C * 2 + warp * ROOM, room, ROOM);
}
// Gates become their sums from the start on; `rest` the sums of those after each.
DEV void sum_gates(float* G, float* rest) {
  const int lane = thread_id() & 31;
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

// ---- numbers whose type the caller chose: 0 float, 1 bf16, 2 fp16
DEV float load_number(const void* p, i64 at, int type) {
  return type == 0 ? ((const float*)p)[at] : type == 1 ? from_bf16(((const u16*)p)[at]) : from_fp16(((const u16*)p)[at]);
}
constexpr int L2NORM = 1, BETA_SIGMOID = 2, BETA_DOUBLE = 4, GATE_IN_KERNEL = 8, LOWER_BOUND = 16;  // flags
DEV float beta_of(const Args& args, float x) {
  if (args.flags & BETA_SIGMOID) x = 1.f / (1.f + exp_(-x));
  return args.flags & BETA_DOUBLE ? 2.f * x : x;
}

// ---- the record of a (chunk, value head): bytes of its vectors
constexpr int RECORD = 544, MINUS_IN = 0, LEFT = 128, OUT = 256, DECAY = 512, REACH = 528;
DEV void put_row(void* rows, i64 place, int vector, int at, float x) {
  *(float*)((char*)rows + place * RECORD + vector + 4 * at) = x;
}
DEV void put_half_row(void* rows, i64 place, int vector, int at, float x) {
  *(number*)((char*)rows + place * RECORD + vector + sizeof(number) * at) = to_number(x);
}
DEV i64 beta_at(const Args& args, const Item& item, int head, int r) {
  return item.batch * args.beta_stride_b + (i64)(item.token + r) * args.beta_stride_t + (item.base + head) * args.beta_stride_h;
}
DEV i64 g_at(const Args& args, const Item& item, int head, int r) {
  return item.batch * args.g_stride_b + (i64)(item.token + r) * args.g_stride_t + (item.base + head) * args.g_stride_h;
}
// ---- gates and betas come as the words that they lie in, so that nobody waits for them; then they are made of those, in their place
DEV void copy_word(float* to, const void* x, int type, i64 at, bool only_ask) {
  const size_t from = (size_t)x + at * (type ? 2 : 4) & ~(size_t)3;
  if (only_ask) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEV float of_word(float word, const void* x, int type, i64 at) {
  const u32 bits = __float_as_uint(word);
  const u16 half = (size_t)x + at * 2 & 2 ? bits >> 16 : bits;
  return type == 0 ? word : type == 1 ? from_bf16(half) : from_fp16(half);
}
template <class T> DEV void copy_words(T& shared, const Args& args, int turn, bool only_ask) {
  const Item& item = shared.items[turn];
#pragma unroll 1
  for (int i = thread_id(); i < 2 * item.count * C; i += THREADS) {
    const int r = i % C, n = i / C, head = n >> 1;
    if (r >= item.rows) continue;
    if (n & 1) copy_word(&shared.beta[turn][head][r], args.beta, args.beta_type, beta_at(args, item, head, r), only_ask);
    else copy_word(&shared.G[head][r], args.g, args.g_type, g_at(args, item, head, r), only_ask);
  }
}

// ---- what the threads of a workgroup share
struct Shared {
  unsigned char room[TEAMS][ROOM];  // for rows of P on their way to memory
  alignas(16) float G[TEAMS][C], rest[TEAMS][C], beta[2][TEAMS][C];
  float q_norm[C], k_norm[C], k_square[C];
  Item items[2];  // the one at work and the next one
  int turn;  // the latest of these
  unsigned n;  // of the item after that
  u64 landed;  // barrier of its tiles
  SharedTile<C, K> q, k;  // tokens of the chunk, zero after the sequence's end
  // Then matrices of the heads at work; of more than two in the tiles' place, where they are made when products are known.
};

// What P and L take from a row and a column.
struct Row { float G, beta; };
struct Column { float G; };
struct Pairs { float p[2], l[2]; };  // of neighbours

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

// The n-th of the items: of a group's value heads, `most` are done at once, and all in so many passes.
DEV Item item_at(const Args& args, unsigned n, unsigned group, unsigned most, unsigned passes) {
  const unsigned heads = args.heads * passes, at = n % heads, head = at / passes, done = at % passes * most;
  const int slot = n / heads;
  const Sequence sequence = sequence_of_slot(args, slot);
  const int first = (slot - sequence.slot) * C;
  return {slot, sequence.batch, sequence.start + first, sequence.length - first < C ? sequence.length - first : C,
          (int)head, (int)(head * group + done), (int)(group - done < most ? group - done : most)};
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
  const auto load_tiles = [&](const Item& item) {
    const u32 landed = shared_address(&shared.landed);
    barrier_expect(landed, 4 * C * K);
#pragma unroll 1
    for (int d = 0; d < K; d += 64) {
      load_box(shared_address(shared.q.x) + 2 * C * d, args.q_map, d, item.head, item.token, item.batch, landed);
      load_box(shared_address(shared.k.x) + 2 * C * d, args.k_map, d, item.head, item.token, item.batch, landed);
    }
  };
  // The next item; no rows where there is none. One thread.
  const auto next_item = [&] {
    Item item = {};
    unsigned n = shared.n;
    for (bool more = true; more && n < args.items; n += args.stride) {
      item = item_at(args, n, args.group, args.heads_at_once, args.passes);
      more = args.apart && item.rows <= 0;
    }
    shared.items[shared.turn ^= 1] = item, shared.n = n;
    return item;
  };
  if (threadIdx.x == 0) {
    shared.turn = 1, shared.n = blockIdx.x;
    barrier_init(shared_address(&shared.landed), 1);
    fence_barriers();
    const Item item = next_item();
    if (item.rows > 0) load_tiles(item);
  }
  for (int i = threadIdx.x; i < TEAMS * ROOM / 16; i += THREADS) ((uint4*)shared.room)[i] = make_uint4(0, 0, 0, 0);  // above the diagonal
  sync();
  copy_words(shared, args, 0, false);
  while (shared.items[shared.turn].rows > 0) {

    const int turn = shared.turn;
    const Item& item = shared.items[turn];
    float (*const beta)[C] = shared.beta[turn];
    barrier_wait(shared_address(&shared.landed), turn);
    // A box that reaches past the sequence holds another one's rows: make them zero.
    for (int i = thread_id(); i < (C - item.rows) * K / 4; i += THREADS) {
      const int row = item.rows + i / (K / 4), column = i / 2 % (K / 8) * 8;
      *(uint4*)&(i & 1 ? shared.k : shared.q).at(row, column) = make_uint4(0, 0, 0, 0);
    }
    sync_tiles();

    // ---- Q Kᵀ and K Kᵀ, once for these heads; meanwhile, a team to a value head, G = sums of the gates from the chunk's
    //      start, `rest` those to its end, as logarithms to the base 2; then 1 / ‖q‖ and 1 / ‖k‖, which are folded into them
    Products products;
    start_products(products, shared.q, shared.k);
    if (team() < item.count) {
      const int value_head = item.base + team();
      float *const G = shared.G[team()], *const rest = shared.rest[team()];
      FOR_TEAM(r, C) {
        beta[team()][r] = r < item.rows ? beta_of(args, of_word(beta[team()][r], args.beta, args.beta_type, beta_at(args, item, team(), r))) : 0.f;
        G[r] = r < item.rows ? 1.44269504f * gate_of(args, of_word(G[r], args.g, args.g_type, g_at(args, item, team(), r)), value_head, value_head) : 0.f;
      }
      sync_team();
      sum_gates(G, rest);
    }
    await_products(products, shared.q, shared.k, args.flags & L2NORM, shared.q_norm, shared.k_norm, shared.k_square);
    stored();  // what is in the place of this item's matrices
    sync();

    // ---- the next item, with its tiles on their way; or into L2, that of a later workgroup
    if (threadIdx.x == 0) {
      const Item next = next_item();
      if (next.rows > 0 && args.apart) load_tiles(next);
      else if (next.rows > 0)
        for (int d = 0; d < K; d += 64) {
          prefetch_box(args.q_map, d, next.head, next.token, next.batch);
          prefetch_box(args.k_map, d, next.head, next.token, next.batch);
        }
    }

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
    const int of = team() ^ 1;
    if (of < item.count) {
      const i64 place = (i64)item.slot * args.value_heads + item.base + of;
      const float *const G = shared.G[of], *const rest = shared.rest[of];
      float growth = 0.f;  // I - b k kᵀ makes nothing longer, unless b |k|² > 2 or b < 0
      FOR_TEAM(r, C) {
        const float in = exp2_(G[r]);
        put_half_row(args.ws_rows, place, MINUS_IN, row_place<C>(r), -in * shared.k_norm[r]);
        put_half_row(args.ws_rows, place, LEFT, row_place<C>(r), exp2_(rest[r]) * shared.k_norm[r]);
        put_row(args.ws_rows, place, OUT, row_place<C>(r), args.scale * in * shared.q_norm[r]);
        if (r == C - 1) put_row(args.ws_rows, place, DECAY, 0, in);
        const float longer = fabsf(1.f - beta[of][r] * shared.k_square[r]);
        growth += longer > 1.f ? log2_(longer) : 0.f;
      }
      growth = sum_team(growth);
      FOR_TEAM(r, 1) put_row(args.ws_rows, place, REACH, r, G[C - 1] + growth);
    }

    // ---- P and L of these heads
    const i64 first_place = (i64)item.slot * args.value_heads + item.base;
    for (int t = 0; t < item.count; t++) {
      store_matrix(
          shared, t, args.apart, args.ws_p, first_place + t, products,
          [&](int r) { return Row{shared.G[t][r], beta[t][r]}; },
          [&](int c) { return Column{shared.G[t][c]}; },
          [&](int r, int c, Row row, const Column* column, const float* qk, const float* kk) {
            float p[2], l[2];
            for (int e = 0; e < 2; e++) {
              const float decay = exp2_(row.G - column[e].G), q_factor = decay, k_factor = row.beta * decay;
              p[e] = c + e <= r ? q_factor * qk[e] : 0.f;
              l[e] = c + e < r ? k_factor * kk[e] : 0.f;
            }
            return Pairs{ {p[0], p[1]}, {l[0], l[1]}};
          });
    }
    sync();
    const int next = shared.turn;
    copy_words(shared, args, next, !args.apart);

    // ---- A = (I + L)⁻¹ diag(b)
    const Item& done = shared.items[next ^ 1];  // not carried over in registers
    store_inverses(shared, done.count, args.apart, shared.beta[next ^ 1], args.ws_a, (i64)done.slot * args.value_heads + done.base);

    if (!args.apart) break;
    sync();  // all is read that the next item's numbers take the place of
  }
  stored();
}
static_assert(sizeof(Shared) + 2 * MATRIX == 66560, "what the launch provides, at most");
