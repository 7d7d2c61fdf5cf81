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

constexpr int THREADS = 128;
DEV int block_id() { return blockIdx.x; }
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
// Turned by the workgroup, so that few teams at work do not all sit on the same quarter of a multiprocessor.
DEV int team() { return ((threadIdx.x >> 5) + blockIdx.x) % TEAMS; }
#define FOR_TEAM(i, n) for (int i = threadIdx.x & 31; i < (n); i += 32)
DEV void sync_team() { __syncwarp(); }
template <int N> struct Number { static constexpr int value = N; };
// Of a matrix: bytes of it, and to parts of it.
constexpr int MATRIX = 12 * 1024, ROOM = 6 * 1024, DIAGONAL = 8 * 1024;

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
DEV void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// A thread's row of a chunk, half of the threads q's, with its gate, the others k's, with beta.
DEV void prefetch_row(const Args& args, int batch, i64 token, int head, int value_head) {
  token += threadIdx.x % C;
  if (token >= args.tokens) return;
  const bool of_q = threadIdx.x < C;
  const number* x = rows_of((const number*)args.k, batch, token, head, args.k_stride_b, args.k_stride_t, args.k_stride_h);
  if (of_q) x = rows_of((const number*)args.q, batch, token, head, args.q_stride_b, args.q_stride_t, args.q_stride_h);
#pragma unroll
  for (int d = 0; d < K; d += 64) prefetch_line(x + d);
  if (of_q) prefetch_line((const char*)args.g + (batch * args.g_stride_b + token * args.g_stride_t + value_head * args.g_stride_h) * (args.g_type ? 2 : 4));
  if (!of_q) prefetch_line((const char*)args.beta + (batch * args.beta_stride_b + token * args.beta_stride_t + value_head * args.beta_stride_h) * (args.beta_type ? 2 : 4));
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
//      A matrix is in shared memory as L's blocks below the diagonal, each of high parts and of rests; room for 16 rows of an
//      image; the blocks on the diagonal, L in float, then X transposed as L. Rows of blocks are 32 bytes, whose halves change
//      places every four rows. In the end the image of A takes the place of all but the diagonal.
DEV constexpr int below(int i, int j) { return (i * (i - 1) / 2 + j) * 1024; }
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
  const u32 at = matrix + DIAGONAL + i * 1024 + (lane >> 2) * 64 + ((lane & 3) * 8 ^ (lane >> 3 & 3) << 4);
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
DEV void multiply_blocks(float (&d)[8], const Split& a, const Split& b) {
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d + 4 * n, a.low, b.high + 2 * n);
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d + 4 * n, a.high, b.low + 2 * n);
#pragma unroll
  for (int n = 0; n < 2; n++) mma_bf16(d + 4 * n, a.high, b.high + 2 * n);
}
// Block rows (a bit of ROWS each) of A = X diag(b), in the image that takes the matrix's place once `all_read` returns.
template <int ROWS, class F>
DEV void make_rows(u32 matrix, const float* betas, int lane, F all_read) {
  const u32 diagonal = matrix + DIAGONAL + inverse_row(lane), lower = matrix + lower_row(lane);
  Split x[4][4];    // X_i,i-t
  u32 a[4][4][4];  // A_i,i-t
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (ROWS >> i & 1) x[i][0] = load_split<true>(diagonal + 1024 * i);
#pragma unroll
  for (int t = 1; t < 4; t++)
#pragma unroll
    for (int i = 3; i >= t; i--) {
      if (!(ROWS >> i & 1)) continue;
      const int j = i - t;
      float sum[8] = {}, product[8] = {};
#pragma unroll
      for (int m = 0; m < t; m++) multiply_blocks(sum, x[i][m], load_split<true>(lower + below(i - m, j)));
      multiply_blocks(product, split(sum), load_split<false>(diagonal + 1024 * j));
#pragma unroll
      for (int e = 0; e < 8; e++) product[e] = -product[e];
      x[i][t] = split(product);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const TwoFloats beta = *(const TwoFloats*)(betas + 16 * j + 8 * n + (lane & 3) * 2);
#pragma unroll
        for (int h = 0; h < 2; h++) a[i][t][2 * n + h] = pack(product[4 * n + 2 * h] * beta.x[0], product[4 * n + 2 * h + 1] * beta.x[1]);
      }
    }
  all_read();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (!(ROWS >> i & 1)) continue;
    float own[8];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const TwoFloats beta = *(const TwoFloats*)(betas + 16 * i + 8 * n + (lane & 3) * 2);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 high = x[i][0].high[2 * n + h], low = x[i][0].low[2 * n + h];
        float* const pair = own + 4 * n + 2 * h;
        pair[0] = __uint_as_float(high << 16) + __uint_as_float(low << 16);
        pair[1] = __uint_as_float(high & 0xFFFF0000) + __uint_as_float(low & 0xFFFF0000);
        a[i][0][2 * n + h] = pack(pair[0] * beta.x[0], pair[1] * beta.x[1]);
      }
    }
    const u32 at = image_block(matrix + 2048 * i, lane), zero[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) store_matrices(at ^ 32 * j, j > i ? zero : a[i][i - j]);
  }
}
// A of `count` heads, on as many teams each as there are for them: they share the block rows.
template <class T> DEV void store_inverses(T& shared, int count, void* to, i64 place) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through all of the kernel in registers
  const int lane = thread & 31;
  for (int n = team(); n < 2 * count; n += TEAMS)
    invert_blocks(shared_address(shared.matrices[n >> 1]) + DIAGONAL + (n & 1) * 2048, lane);
  stored();
  sync();
  const int shift = count > 2 ? 0 : 3 - count, item = team() >> shift, part = team() & ((1 << shift) - 1);
  if (item >= count) {
    return;
  }
  const u32 matrix = shared_address(shared.matrices[item]);
  const float* betas = shared.beta[item];
  char* image = (char*)to + (place + item) * C * C * 2;
  const auto rows = [&](auto own) {
    make_rows<own.value>(matrix, betas, lane, [] { sync(); });
    for (int i = 0; i < 4; i++)
      if (own.value >> i & 1) store_bulk(image + 2048 * i, matrix + 2048 * i, 2048);
  };
  if (shift == 0) {
    make_rows<15>(matrix, betas, lane, [] { __syncwarp(); });
    store_bulk(image, matrix, C * C * 2);
  } else if (shift == 1) {
    if (part) rows(Number<6>());
    else rows(Number<9>());
  } else if (part == 0) rows(Number<8>());
  else if (part == 1) rows(Number<4>());
  else if (part == 2) rows(Number<2>());
  else rows(Number<1>());
  stored();
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
// 1 / ‖x‖ of this warp's rows of a tile, and where `squares` are wanted ‖x‖² with that factor: squares are on the diagonals of blocks of eight.
DEV void norms(u32 tile, bool wanted, float* to, float* squares, int lane) {
  float low[4] = {}, high[4] = {};
  if (wanted || squares) {
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
  const int row = lane >> 2;
  if ((row & 6) == 2 * (lane & 3)) {
    const float square[2] = {row & 1 ? low[1] : low[0], row & 1 ? high[3] : high[2]};
    for (int h = 0; h < 2; h++) {
      const float norm = wanted ? rsqrt_(1e-6f + square[h]) : 1.f;
      to[row + 8 * h] = norm;
      if (squares) squares[row + 8 * h] = square[h] * norm * norm;
    }
  }
}
DEV Products gram(SharedTile<C, K>& q, SharedTile<C, K>& k, bool wanted, float* q_norm, float* k_norm, float* k_square) {
  Products p;
  const u32 from_q = shared_address(q.x), from_k = shared_address(k.x);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int d = 0; d < K; d += 16) {
    const u32 step = d / 64 * C * 128 + 2 * (d & 63);
    multiply_tiles<0>(p.qk, descriptor(from_q + step, 16), descriptor(from_k + step, 16), d > 0);
    multiply_tiles<0>(p.kk, descriptor(from_k + step, 16), descriptor(from_k + step, 16), d > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  norms(from_q + warp * 2048, wanted, q_norm + 16 * warp, nullptr, lane);
  norms(from_k + warp * 2048, wanted, k_norm + 16 * warp, k_square + 16 * warp, lane);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  touch(p.qk);
  touch(p.kk);
  return p;
}
// Calls f(r, c, row(r), {column(c), column(c + 1)}, q k, k k, i) for this lane's pairs of neighbours of a block of 16 columns.
template <int BLOCK, class R, class S, class F> DEV void for_block(Products& p, const R (&rows)[2], S column, F f) {
  const int lane = threadIdx.x & 31, r = (threadIdx.x >> 5) * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int c = 16 * BLOCK + 8 * n + 2 * (lane & 3), at = 8 * BLOCK + 4 * n;
    const decltype(column(0)) columns[2] = {column(c), column(c + 1)};
#pragma unroll
    for (int h = 0; h < 2; h++) f(r + 8 * h, c, rows[h], columns, p.qk + at + 2 * h, p.kk + at + 2 * h, 2 * n + h);
  }
}
template <class R, class S, class F> DEV void for_pairs(Products& p, R row, S column, F f) {
  const int warp = threadIdx.x >> 5, r = warp * 16 + ((threadIdx.x & 31) >> 2);
  const decltype(row(0)) rows[2] = {row(r), row(r + 8)};
  auto g = [&](int r, int c, auto of_row, const auto* columns, float* qk, float* kk, int) { f(r, c, of_row, columns, qk, kk); };
  for_block<0>(p, rows, column, g);
  if (warp > 0) for_block<1>(p, rows, column, g);
  if (warp > 1) for_block<2>(p, rows, column, g);
  if (warp > 2) for_block<3>(p, rows, column, g);
}

// P of a chunk, zero above the diagonal, and L, by their pairs f.
template <class T, class R, class S, class F>
DEV void store_matrix(T& shared, int head, void* to, i64 place, Products& products, R row, S column, F f) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried from head to head in registers
  const int warp = thread >> 5, lane = thread & 31, r = warp * 16 + (lane >> 2);
  const decltype(row(0)) rows[2] = {row(r), row(r + 8)};
  const u32 room = shared_address(shared.matrices[warp]) + ROOM, lower = shared_address(shared.matrices[head]);
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
  const u32 zero[4] = {};
  if (warp > 0) block(Number<0>(), Number<1>());
  else if (warp == 0) block(Number<0>(), Number<0>());
  if (warp > 1) block(Number<1>(), Number<1>());
  else if (warp == 1) block(Number<1>(), Number<0>());
  else store_matrices(at ^ 32, zero);
  if (warp > 2) block(Number<2>(), Number<1>());
  else if (warp == 2) block(Number<2>(), Number<0>());
  else store_matrices(at ^ 64, zero);
  if (warp == 3) block(Number<3>(), Number<0>());
  else store_matrices(at ^ 96, zero);
  store_bulk((char*)to + place * C * C * 2 + warp * 2048, room, 2048);
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
constexpr int RECORD = 544, MINUS_IN = 0, LEFT = 128, OUT = 256, DECAY = 512, REACH = 528;
DEV void put_row(void* rows, i64 place, int vector, int at, float x) {
  *(float*)((char*)rows + place * RECORD + vector + 4 * at) = x;
}
DEV void put_half_row(void* rows, i64 place, int vector, int at, float x) {
  *(number*)((char*)rows + place * RECORD + vector + sizeof(number) * at) = to_number(x);
}

// ---- what the threads of a workgroup share
struct Shared {
  union {
    struct { SharedTile<C, K> q, k; };  // tokens of the chunk, zero after the sequence's end; once their products are known
    alignas(1024) unsigned char matrices[TEAMS][MATRIX];
  };
  alignas(16) float G[TEAMS][C], rest[TEAMS][C], beta[TEAMS][C];
  float q_norm[C], k_norm[C], k_square[C];
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

  // ---- on their way from memory, now that it has less to do: rows of the workgroup that comes when those at work are over
  const unsigned later = at + 528;
  prefetch_row(args, sequence.batch, token + (i64)(later / heads) * C, later % heads / passes,
               later % heads / passes * group + later % heads % passes * TEAMS);

  // ---- Q Kᵀ and K Kᵀ, once for these heads, and 1 / ‖q‖ and 1 / ‖k‖, which are folded into them
  Products products = gram(shared.q, shared.k, args.flags & L2NORM, shared.q_norm, shared.k_norm, shared.k_square);
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
    float growth = 0.f;  // I - b k kᵀ makes nothing longer, unless b |k|² > 2 or b < 0
    FOR_TEAM(r, C) {
      const float in = exp2_(G[r]);
      put_half_row(args.ws_rows, place, MINUS_IN, row_place<C>(r), -in * shared.k_norm[r]);
      put_half_row(args.ws_rows, place, LEFT, row_place<C>(r), exp2_(rest[r]) * shared.k_norm[r]);
      put_row(args.ws_rows, place, OUT, row_place<C>(r), args.scale * in * shared.q_norm[r]);
      if (r == C - 1) put_row(args.ws_rows, place, DECAY, 0, in);
      const float longer = fabsf(1.f - shared.beta[team()][r] * shared.k_square[r]);
      growth += longer > 1.f ? log2_(longer) : 0.f;
    }
    growth = sum_team(growth);
    FOR_TEAM(r, 1) put_row(args.ws_rows, place, REACH, r, G[C - 1] + growth);
  }

  // ---- P and L of these heads
  const i64 first_place = (i64)slot * args.value_heads + base;
  for (int t = 0; t < count; t++) {
    store_matrix(
        shared, t, args.ws_p, first_place + t, products,
        [&](int r) { return Row{shared.G[t][r], shared.beta[t][r]}; },
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

  // ---- A = (I + L)⁻¹ diag(b)
  store_inverses(shared, count, args.ws_a, first_place);
}
static_assert(sizeof(Shared) == 53248, "what the launch provides");
