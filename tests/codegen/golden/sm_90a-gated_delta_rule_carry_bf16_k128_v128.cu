// gated_delta_rule_carry_bf16_k128_v128 for sm_90a: what a segment makes of a state.
// Rendered by qla-codegen. Build:
//   nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o gated_delta_rule_carry_bf16_k128_v128.cubin gated_delta_rule_carry_bf16_k128_v128.cu

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
  CUtensorMap k_map;
  CUtensorMap v_map;
  void* ws_a;
  void* ws_rows;
  void* cu_seqlens;
  void* initial_state;
  void* ws_carry;
  i64 initial_stride_n;
  i64 initial_stride_h;
  i64 initial_stride_k;
  i64 initial_stride_v;
  int tokens;
  int heads;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
  int sequences;
  int segment_chunks;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 128, V = 128;  // head dims

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
// A segment of a sequence: its rows, and whether the sequence starts or ends with it. There is none where `rows.length` is
// negative.
struct Segment {
  Sequence rows;
  int n_sequence;
  bool first, last;
};
// The number of a sequence's first segment.
DEV int first_segment(const Args& args, int n) {
  const int tokens = C * args.segment_chunks;
  return args.has_cu_seqlens ? clamp(boundary(args, n), 0, args.tokens) / tokens + n : n * ((args.tokens + tokens - 1) / tokens);
}
DEV Segment segment_at(const Args& args, int segment) {
  if (!args.segment_chunks) return {sequence_at(args, segment), segment, true, true};
  int low = 0, high = args.sequences - 1;  // the last sequence whose first segment is not after it
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_segment(args, middle) <= segment) low = middle;
    else high = middle - 1;
  }
  const int tokens = C * args.segment_chunks, before = (segment - first_segment(args, low)) * tokens;
  Sequence rows = sequence_at(args, low);
  rows.start += before;
  rows.slot += before / C;
  rows.length -= before;
  const bool first = before == 0, last = rows.length <= tokens;
  if (!last) rows.length = tokens;
  else if (!first && rows.length <= 0) rows.length = -1;
  return {rows, low, first, last};
}
// Floats of a segment and value head: row by row N, then M, and whether M is anything but zero. `combine` leaves the state at
// the segment's end where N was; where M is zero, and in a sequence's first segment, N is that state.
constexpr int CARRIED = K * (V + K) + 32, HAS_M = K * (V + K);

// ---- barriers and bulk copies
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
DEV void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// Predicated rather than branched over: a branch between two wgmmas makes the compiler serialize them.
DEV void barrier_arrive_if(u32 barrier, u32 wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(wanted)
               : "memory");
}
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEV void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Boxes of 64 columns and one chunk of tokens.
DEV void load_box(u32 to, const CUtensorMap& map, int column, int head, int token, int batch, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4, %5}], [%6];"
               ::"r"(to), "l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch), "r"(barrier) : "memory");
}

// ---- tiles in shared memory
// Byte of element (row, column) of a tile of `rows` rows: boxes of 64 columns, 16-byte pieces exchanged by row.
DEV u32 tile_offset(int rows, int row, int column) {
  return (column >> 6) * rows * 128 + row * 128 + ((((column >> 3) & 7) ^ (row & 7)) << 4) + (column & 7) * 2;
}
// How wgmma finds a tile: boxes are `leading` bytes apart, groups of eight rows 1024.
DEV u64 descriptor(u32 address, u32 leading) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
template <int ROWS, int COLUMNS>
struct Tile {
  u32 address;
  // As wgmma's b[16 of COLUMNS][ROWS], step k: pieces of 32 bytes of each row.
  DEV u64 step(int k) const { return descriptor(address, 16) + (k >> 2) * (ROWS * 128 >> 4) + 2 * (k & 3); }
};
template <int ROWS, int COLUMNS>
struct Transposed {
  u32 address;
  // As b[16 of ROWS][COLUMNS], step k: 16 whole rows.
  DEV u64 step(int k) const { return descriptor(address, ROWS * 128) + 128 * k; }
};
template <int ROWS, int COLUMNS>
DEV Transposed<ROWS, COLUMNS> transposed(Tile<ROWS, COLUMNS> t) { return {t.address}; }
// Zero above the diagonal: the first half of its rows needs only the first half of its columns.
template <int ROWS>
struct LowerTile : Tile<ROWS, ROWS> {};

// ---- values in registers
template <int ROWS> struct Block { float x[ROWS / 2]; };
template <int ROWS> struct Operand { u32 x[ROWS / 4]; };
template <int ROWS> struct HalfRows { u32 x[ROWS / 8]; };
template <int ROWS> struct FloatRows { float x[ROWS / 4]; };
template <int BYTE> struct Shared { u32 address; };

template <int ROWS> DEV void touch(Block<ROWS>& b) {
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(b.x[i])::"memory");
}
template <int ROWS> DEV void touch(Operand<ROWS>& b) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) asm volatile("" : "+r"(b.x[i])::"memory");
}
DEV u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEV u32 mul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEV void load_shared(u32* r, u32 address) {
  asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEV float load_shared(u32 address) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(address) : "memory");
  return r;
}

// ---- products: d[rows, 64] = tile · x, on the tensor cores, awaited later
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// d[64 columns][32] (+)= a[64][16] b[16][32]; `SET` overwrites d, `TRANSPOSED` reads b with its rows contiguous.
template <bool SET, int TRANSPOSED>
DEV void wgmma_n32(float* d, const u32* a, u64 b) {
  if constexpr (SET)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, %21;\n}\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
                   "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, 1, 1, 1, %21;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
}
// d[64 columns][64] (+)= a[64][16] b[16][64]; `SET` overwrites d, `TRANSPOSED` reads b with its rows contiguous.
template <bool SET, int TRANSPOSED>
DEV void wgmma_n64(float* d, const u32* a, u64 b) {
  if constexpr (SET)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, %37;\n}\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
                   "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
                   "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
                   "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, 1, 1, 1, %37;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
}
// d[64 columns][128] (+)= a[64][16] b[16][128]; `SET` overwrites d, `TRANSPOSED` reads b with its rows contiguous.
template <bool SET, int TRANSPOSED>
DEV void wgmma_n128(float* d, const u32* a, u64 b) {
  if constexpr (SET)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, p, 1, 1, %69;\n}\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
                   "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
                   "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
                   "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]),
                   "=f"(d[32]), "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]),
                   "=f"(d[40]), "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]),
                   "=f"(d[48]), "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]),
                   "=f"(d[56]), "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                 "{%64,%65,%66,%67}, %68, 1, 1, 1, %69;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
}

template <int N, bool SET, int TRANSPOSED>
DEV void wgmma(float* d, const u32* a, u64 b) {
  if constexpr (N == 32) wgmma_n32<SET, TRANSPOSED>(d, a, b);
  if constexpr (N == 64) wgmma_n64<SET, TRANSPOSED>(d, a, b);
  if constexpr (N == 128) wgmma_n128<SET, TRANSPOSED>(d, a, b);
}
// One k-step of 16 of a product.
template <bool SET, int N, int R>
DEV void multiply(Block<N>& d, Tile<N, R> t, const u32* a, int k) {
  if (SET && k == 0) wgmma<N, true, 0>(d.x, a, t.step(k));
  else wgmma<N, false, 0>(d.x, a, t.step(k));
}
template <bool SET, int N, int R>
DEV void multiply(Block<N>& d, Transposed<R, N> t, const u32* a, int k) {
  wgmma<N, false, 1>(d.x, a, t.step(k));
}
template <bool SET, int N>
DEV void multiply(Block<N>& d, LowerTile<N> t, const u32* a, int k) {
  constexpr int H = N / 2;  // rows of a half, H / 2 accumulators of a lane
  const u64 lower = t.step(k) + (H * 128 >> 4);
  if (SET && k == 0) {
    wgmma<H, true, 0>(d.x, a, t.step(k));
    wgmma<H, true, 0>(d.x + H / 2, a, lower);
  } else {
    if (k < H / 16) wgmma<H, false, 0>(d.x, a, t.step(k));
    wgmma<H, false, 0>(d.x + H / 2, a, lower);
  }
}
template <int PART, int PARTS, bool SET, int N, int R, class T>
DEV void issue(Block<N>& d, T t, Operand<R>& x) {
  touch(x);
  wgmma_fence();
#pragma unroll
  for (int k = PART * R / 16 / PARTS; k < (PART + 1) * R / 16 / PARTS; k++) multiply<SET>(d, t, x.x + 4 * k, k);
  wgmma_commit();
}
template <int PART = 0, int PARTS = 1, int N, int R, class T>
DEV void product(Block<N>& d, T t, Operand<R>& x) { issue<PART, PARTS, true>(d, t, x); }
template <int PART = 0, int PARTS = 1, int N, int R, class T>
DEV void accumulate(Block<N>& d, T t, Operand<R>& x) { issue<PART, PARTS, false>(d, t, x); }
// Waits until at most `UNDER_WAY` of the committed products are not over; `blocks` may then be read.
template <int UNDER_WAY, class... B>
DEV void await(B&... blocks) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
  (touch(blocks), ...);
}
template <int N> DEV void to_operand(Operand<N>& x, const Block<N>& b) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) x.x[i] = pack(b.x[2 * i], b.x[2 * i + 1]);
}
// x = round(b) and d = tile · x; the second half is rounded while the first is multiplied.
template <int N, int R, class T>
DEV void product_rounded(Block<N>& d, T t, Operand<R>& x, const Block<R>& b) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    constexpr int PAIRS = R / 8;
#pragma unroll
    for (int i = half * PAIRS; i < (half + 1) * PAIRS; i++) {
      x.x[i] = pack(b.x[2 * i], b.x[2 * i + 1]);
      asm volatile("" : "+r"(x.x[i])::"memory");
    }
    wgmma_fence();
#pragma unroll
    for (int k = half * R / 32; k < (half + 1) * R / 32; k++) multiply<true>(d, t, x.x + 4 * k, k);
    wgmma_commit();
  }
}

// ---- element by element: lane holds rows 8 j + 2 (lane % 4) + e as x[4 j + 2 h + e], h the upper half of its columns
template <int BYTE, int N> DEV void load_rows(HalfRows<N>& r, Shared<BYTE> v) {
#pragma unroll
  for (int i = 0; i < N / 8; i += 4) load_shared(r.x + i, v.address + BYTE + (threadIdx.x & 3) * (N / 2) + 4 * i);
}
template <int BYTE, int N> DEV void load_rows(FloatRows<N>& r, Shared<BYTE> v) {
#pragma unroll
  for (int i = 0; i < N / 4; i += 4) load_shared((u32*)r.x + i, v.address + BYTE + (threadIdx.x & 3) * N + 4 * i);
}
template <int N> DEV void add_scaled(Operand<N>& x, const HalfRows<N>& r, const Block<N>& b) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) x.x[i] = fma2(pack(b.x[2 * i], b.x[2 * i + 1]), r.x[i >> 1], x.x[i]);
}
template <int N> DEV void scaled_operand(Operand<N>& x, const HalfRows<N>& r, const Operand<N>& y) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) x.x[i] = mul2(y.x[i], r.x[i >> 1]);
}
template <int PART = 0, int PARTS = 1, int BYTE, int N> DEV void scale(Block<N>& b, Shared<BYTE> v) {
  const float factor = load_shared(v.address + BYTE);
#pragma unroll
  for (int i = PART * N / 2 / PARTS; i < (PART + 1) * N / 2 / PARTS; i++) {
    b.x[i] *= factor;
    asm volatile("" : "+f"(b.x[i])::"memory");
  }
}
// Byte of this lane's row of a [rows, 64] tile of 8x8 matrices, for ldmatrix and stmatrix.
DEV u32 matrix_offset() {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, matrix = lane >> 3, row = lane & 7;
  return ((matrix >> 1) * 8 + row) * 128 + (((2 * warp + (matrix & 1)) ^ row) << 4);
}
template <int N> DEV void load_operand(Operand<N>& x, Tile<N, 64> t) {
#pragma unroll
  for (int i = 0; i < N / 16; i++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(x.x[4 * i]), "=r"(x.x[4 * i + 1]), "=r"(x.x[4 * i + 2]), "=r"(x.x[4 * i + 3])
                 : "r"(t.address + matrix_offset() + 2048 * i) : "memory");
}
// Number i of a block is that of row block_row(i) + lane_row() and column block_column(i) + lane_column().
DEV constexpr int block_row(int i) { return 8 * (i >> 2) + (i & 1); }
DEV constexpr int block_column(int i) { return 8 * ((i >> 1) & 1); }
DEV int lane_row(int thread = threadIdx.x) { return (thread & 3) * 2; }
DEV int lane_column(int thread = threadIdx.x) { return ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2); }
// Calls f(row, column, number) for what this lane holds of a block.
template <int N, class F> DEV void for_each(Block<N>& b, F f) {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // addresses are made here, not carried through the chain in registers
  const i64 row = lane_row(thread), column = lane_column(thread);  // wide: then constants become offsets of one address
#pragma unroll
  for (int i = 0; i < N / 2; i++) f(row + block_row(i), column + block_column(i), b.x[i]);
}

// ---- rings: buffers of tiles that travel together; `slot` and `phase` are those of the chunk that landed last
template <int DEPTH, int BARRIERS>
struct Ring {
  u32 shared;
  int slot = DEPTH - 1;
  u32 phase = 1;
  DEV void next() {
    phase ^= slot == DEPTH - 1;
    slot = slot == DEPTH - 1 ? 0 : slot + 1;
  }
  DEV u32 full() const { return shared + BARRIERS + 8 * slot; }
  DEV u32 empty() const { return full() + 8 * DEPTH; }
  DEV void init(u32 readers) {
    for (int i = 0; i < DEPTH; i++) {
      barrier_init(shared + BARRIERS + 8 * i, 1);
      barrier_init(shared + BARRIERS + 8 * (DEPTH + i), readers);
    }
  }
};
struct Ring_K : Ring<3, 108128> {
  DEV Tile<64, 128> K() const {
    return {shared + slot * 24576};
  }
  DEV Tile<64, 64> V(int stream) const {
    return {shared + 16384 + slot * 24576 + stream * 8192};
  }
  struct Rows {
    u32 address;
    DEV Shared<0> minus_in() const { return {address}; }
    DEV Shared<128> left() const { return {address}; }
    DEV Shared<256> out() const { return {address}; }
    DEV Shared<512> decay() const { return {address}; }
    DEV Shared<528> reach() const { return {address}; }
  };
  DEV u32 rows_address() const { return shared + 106496 + slot * 544; }
  DEV Rows rows() const { return {rows_address()}; }
};
struct Ring_A : Ring<3, 108176> {
  DEV LowerTile<64> A() const {
    return {{shared + 73728 + slot * 8192}};
  }
};
template <class R> DEV void land(R& ring) {
  ring.next();
  barrier_wait(ring.full(), ring.phase);
}
template <class R> DEV void release(R& ring) {
  __syncwarp();
  barrier_arrive_if(ring.empty(), (threadIdx.x & 31) == 0);
}

constexpr int STREAMS = 1;  // column blocks of 64 in a workgroup
// Bytes into shared memory.
constexpr int TAIL_BARRIER = 108240;

// A box that reaches past the sequence holds another one's rows: make them zero. Whole warp.
DEV void clear_rows(u32 tile, int columns, int rows) {
  for (int i = threadIdx.x & 31; i < (C - rows) * columns / 8; i += 32) {
    const u32 at = tile + tile_offset(C, rows + i / (columns / 8), i % (columns / 8) * 8);
    asm volatile("st.shared.v4.b32 [%0], { %1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
}

// Of a segment of so many chunks, the first ones before whose end a state does not matter to the segment's: what is left of
// it is below 2^-258 of it, by the decays, with a bit a chunk for rounding. A float is below 2^128, sums of K = 128 of them
// at most 2^4 times one's norm, and what is below 2^-126 counts as zero: nothing that float holds would be there. Whole warp.
DEV int chunks_out_of_reach(const Args& args, int slot, int chunks, int value_head, int lane) {
  float total = 0.f;
  for (int end = chunks; end > 0; end -= 32) {
    const int n = end - 1 - lane;
    float left = n < 0 ? 0.f : 1.f + *(const float*)((const char*)args.ws_rows + ((i64)(slot + n) * args.value_heads + value_head) * 544 + 528);
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float later = __shfl_up_sync(~0u, left, d);
      if (lane >= d) left += later;
    }
    const u32 gone = __ballot_sync(~0u, n >= 0 && total + left < -258.f);
    if (gone) return end - __ffs(gone);
    total += __shfl_sync(~0u, left, 31);
  }
  return 0;
}
extern "C" __global__ void __launch_bounds__(192, 2) gated_delta_rule_carry_bf16_k128_v128(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  // Through a shuffle the compiler knows that it is the same for all lanes.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

  // ---- what this workgroup works on
  // Columns of values, whose state begins as zero, then columns of the identity, which have no values. The state at a
  // sequence's start is known: its first segment begins with that, and needs no other columns.
  constexpr int SPLITS = (V + K) / (64 * STREAMS);
  const int split = blockIdx.x % SPLITS, value_head = blockIdx.x / SPLITS % args.value_heads;
  const int n_segment = blockIdx.x / SPLITS / args.value_heads;
  const Segment segment = segment_at(args, n_segment);
  if (segment.rows.length < 0 || segment.last) return;
  const bool values = split * STREAMS * 64 < V;
  if (segment.first && !values) return;
  Sequence sequence = segment.rows;
  int chunks = (sequence.length + C - 1) / C;
  // What was there before `skipped` chunks were over is gone at the segment's end.
  const int skipped = chunks_out_of_reach(args, sequence.slot, chunks, value_head, lane);
  const bool known = segment.first && !skipped;
  if (skipped) sequence.start += skipped * C, sequence.slot += skipped, sequence.length -= skipped * C, chunks -= skipped;
  if (split * STREAMS * 64 == V && threadIdx.x == 0)
    ((int*)args.ws_carry)[(i64)(n_segment * args.value_heads + value_head) * CARRIED + HAS_M] = !skipped;
  if (skipped && !values) return;

  // ---- rings and barriers
  Ring_K ring_K{ {shared} };
  Ring_A ring_A{ {shared} };
  if (threadIdx.x == 0) {
    ring_K.init(4 * STREAMS);
    ring_A.init(4 * STREAMS);
    barrier_init(shared + TAIL_BARRIER, 1);
    fence_barriers();
    fence_async();
  }
  if (!values)
    for (int i = threadIdx.x; i < 3 * STREAMS * C * 8; i += 192) {
      const u32 at = shared + 16384 + i / (STREAMS * C * 8) * 24576 + i % (STREAMS * C * 8) * 16;
      asm volatile("st.shared.v4.b32 [%0], { %1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
  __syncthreads();

  if (warp >= 4 * STREAMS) {
    if (warp == 4 * STREAMS) {
      // ---- load role
      const int head = value_head * args.heads / args.value_heads;
      u32 tail_phase = 0;
      for (int n = 0; n < chunks; n++) {
        const int token = sequence.start + n * C, rows = min(C, sequence.length - n * C);
        const i64 slot = (i64)(sequence.slot + n) * args.value_heads + value_head;
        const bool tail = rows < C;
        {  // K, V, rows
          ring_K.next();
          barrier_wait(ring_K.empty(), ring_K.phase ^ 1);
          const u32 full = tail ? shared + TAIL_BARRIER : ring_K.full();
          if (lane == 0) {
            barrier_expect(full, values ? 25120 : 16928);
            load_box(ring_K.K().address, args.k_map, 0, head, token, sequence.batch, full);
            load_box(ring_K.K().address + 8192, args.k_map, 64, head, token, sequence.batch, full);
            if (values) for (int s = 0; s < STREAMS; s++)
              load_box(ring_K.V(s).address, args.v_map, (split * STREAMS + s) * 64, value_head, token, sequence.batch, full);
            copy_bulk(ring_K.rows_address(), (const char*)args.ws_rows + slot * 544, 544, full);
          }
          if (tail) {
            barrier_wait(full, tail_phase);
            tail_phase ^= 1;
            clear_rows(ring_K.K().address, 128, rows);
            if (values) for (int s = 0; s < STREAMS; s++) clear_rows(ring_K.V(s).address, 64, rows);
            fence_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(ring_K.full());
          }
        }
        {  // A
          ring_A.next();
          barrier_wait(ring_A.empty(), ring_A.phase ^ 1);
          const u32 full = ring_A.full();
          if (lane == 0) {
            barrier_expect(full, 8192);
            copy_bulk(ring_A.A().address, (const char*)args.ws_a + slot * 8192, 8192, full);
          }
        }
      }
    }
    return;
  }

  // ---- chain role: one warpgroup per column block
  const int stream = 0;
  const int column = (split * STREAMS + stream) * 64;
  Block<128> S;
  Operand<128> Sr;
  Operand<64> Vr;
  Block<64> U;
  Block<64> V2;
  Operand<64> W;
  Operand<64> X;
  HalfRows<64> left;
  HalfRows<64> minus_in;
  if (known && args.initial_state) {
    const float* from = (const float*)args.initial_state + segment.n_sequence * args.initial_stride_n + value_head * args.initial_stride_h;
    for_each(S, [&](i64 k, i64 v, float& x) { x = from[k * args.initial_stride_k + (column + v) * args.initial_stride_v]; });
  } else {
    for_each(S, [&](int k, int v, float& x) { x = k == column + v - V ? 1.f : 0.f; });
  }

  // chunk n
  int n = 0;
  auto advance = [&] {
    // U = K S
    land(ring_K);
    product_rounded(U, ring_K.K(), Sr, S);
    // V, on the way to W
    load_operand(W, ring_K.V(stream));
    load_rows(minus_in, ring_K.rows().minus_in());
    // row factors of V'
    load_rows(left, ring_K.rows().left());
    // W = V - in U
    await<0>(U);
    add_scaled(W, minus_in, U);
    // V' = A W
    land(ring_A);
    product(V2, ring_A.A(), W);
    // S = decay S
    scale(S, ring_K.rows().decay());
    // V' rounded
    await<0>(V2);
    release(ring_A);
    to_operand(Vr, V2);
    // S += Kᵀ (left V')
    scaled_operand(X, left, Vr);
    accumulate(S, transposed(ring_K.K()), X);
    await<0>(S);
    release(ring_K);
    n++;
  };
  while (n + 0 < chunks) {
    advance();
  }
  while (n < chunks) {
    advance();
  }
  int block = blockIdx.x / SPLITS;
  asm volatile("" : "+r"(block));  // as in for_each
  float* to = (float*)args.ws_carry + (i64)block * CARRIED + column;
  for_each(S, [&](i64 k, i64 v, float x) { to[k * (V + K) + v] = x; });
}
