// kda_scan_fp16_k128_v64 for sm_90a: the chain over chunks.
// Rendered by qla-codegen. Build:
//   nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o kda_scan_fp16_k128_v64.cubin kda_scan_fp16_k128_v64.cu

#define DEV __device__ __forceinline__
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef u16 number;  // fp16
struct __align__(64) CUtensorMap { u64 opaque[16]; };

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// ---- arguments: one block; strides in elements
struct Args {
  CUtensorMap v_map;
  CUtensorMap o_map;
  void* ws_k_in;
  void* ws_k_out;
  void* ws_q_in;
  void* ws_a;
  void* ws_p;
  void* ws_rows;
  void* cu_seqlens;
  void* initial_state;
  void* final_state;
  void* o;
  void* ws_carry;
  i64 o_stride_b;
  i64 o_stride_t;
  i64 o_stride_h;
  i64 initial_stride_n;
  i64 initial_stride_h;
  i64 initial_stride_k;
  i64 initial_stride_v;
  i64 final_stride_n;
  i64 final_stride_h;
  i64 final_stride_k;
  i64 final_stride_v;
  int tokens;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
  int sequences;
  int segment_chunks;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 128, V = 64;  // head dims

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
constexpr int CARRIED = K * (V + K) + 32;
// The rows of a head, from a token on.
template <class T>
DEV T* rows_of(T* x, int batch, i64 token, int head, i64 stride_b, i64 stride_t, i64 stride_h) {
  return x + batch * stride_b + token * stride_t + head * stride_h;
}

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
DEV void store_box(const CUtensorMap& map, int column, int head, int token, int batch, u32 from) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, { %1, %2, %3, %4}], [%5];\ncp.async.bulk.commit_group;"
               ::"l"(&map), "r"(column), "r"(head), "r"(token), "r"(batch), "r"(from) : "memory");
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
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEV void load_shared(u32* r, u32 address) {
  asm volatile("ld.shared.v4.b32 { %0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// ---- products: d[rows, 64] = tile · x, on the tensor cores, awaited later
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// d[64 columns][32] (+)= a[64][16] b[16][32]; `SET` overwrites d, `TRANSPOSED` reads b with its rows contiguous.
template <bool SET, int TRANSPOSED>
DEV void wgmma_n32(float* d, const u32* a, u64 b) {
  if constexpr (SET)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, p, 1, 1, %21;\n}\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
                   "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
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
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, p, 1, 1, %37;\n}\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]),
                   "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]),
                   "=f"(d[16]), "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]),
                   "=f"(d[24]), "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
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
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
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
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
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
  // Halves of an accumulator that a whole product has begun would serialize: only fresh ones are halved.
  if constexpr (!SET) return wgmma<N, false, 0>(d.x, a, t.step(k));
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
template <int N> DEV void subtract(Operand<N>& x, const Block<N>& b) {
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    x.x[i] = fma2(pack(b.x[2 * i], b.x[2 * i + 1]), 0xBC00BC00, x.x[i]);  // -1 in both halves
}
template <int PART = 0, int PARTS = 1, int BYTE, int N> DEV void scale_rows(Block<N>& b, Shared<BYTE> v) {
#pragma unroll
  for (int i = PART * N / 4 / PARTS; i < (PART + 1) * N / 4 / PARTS; i += 4) {
    float r[4];
    load_shared((u32*)r, v.address + BYTE + (threadIdx.x & 3) * N + 4 * i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      b.x[2 * i + j] *= r[2 * (j >> 2) + (j & 1)];
      asm volatile("" : "+f"(b.x[2 * i + j])::"memory");
    }
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
template <int N> DEV void store_operand(u32 address, const Operand<N>& x) {
#pragma unroll
  for (int i = 0; i < N / 16; i++)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4};"
                 ::"r"(address + matrix_offset() + 2048 * i),
                 "r"(x.x[4 * i]), "r"(x.x[4 * i + 1]), "r"(x.x[4 * i + 2]), "r"(x.x[4 * i + 3]) : "memory");
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
struct Ring_K : Ring<3, 230912> {
  DEV Tile<64, 128> K() const {
    return {shared + slot * 40960};
  }
  DEV Tile<64, 128> Kt() const {
    return {shared + 16384 + slot * 40960};
  }
  DEV Tile<64, 64> V(int stream) const {
    return {shared + 32768 + slot * 40960 + stream * 8192};
  }
  struct Rows {
    u32 address;
    DEV Shared<0> decay() const { return {address}; }
  };
  DEV u32 rows_address() const { return shared + 229376 + slot * 512; }
  DEV Rows rows() const { return {rows_address()}; }
};
struct Ring_Q : Ring<3, 230960> {
  DEV Tile<64, 128> Q() const {
    return {shared + 122880 + slot * 16384};
  }
};
struct Ring_A : Ring<3, 231008> {
  DEV LowerTile<64> A() const {
    return {{shared + 172032 + slot * 8192}};
  }
};
struct Ring_P : Ring<3, 231056> {
  DEV LowerTile<64> P() const {
    return {{shared + 196608 + slot * 8192}};
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
constexpr int OUTPUT = 221184, OUTPUT_BARRIERS = 231104, TAIL_BARRIER = 231120;

// A box that reaches past the sequence holds another one's rows: make them zero. Whole warp.
DEV void clear_rows(u32 tile, int columns, int rows) {
  for (int i = threadIdx.x & 31; i < (C - rows) * columns / 8; i += 32) {
    const u32 at = tile + tile_offset(C, rows + i / (columns / 8), i % (columns / 8) * 8);
    asm volatile("st.shared.v4.b32 [%0], { %1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(192, 1) kda_scan_fp16_k128_v64(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  // Through a shuffle the compiler knows that it is the same for all lanes.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

  // ---- what this workgroup works on
  constexpr int SPLITS = V / (64 * STREAMS);
  const int split = blockIdx.x % SPLITS, value_head = blockIdx.x / SPLITS % args.value_heads;
  const int n_segment = blockIdx.x / SPLITS / args.value_heads;
  const Segment segment = segment_at(args, n_segment);
  if (segment.rows.length < 0) return;
  const Sequence sequence = segment.rows;
  const int chunks = (sequence.length + C - 1) / C;

  // ---- rings and barriers
  Ring_K ring_K{ {shared} };
  Ring_Q ring_Q{ {shared} };
  Ring_A ring_A{ {shared} };
  Ring_P ring_P{ {shared} };
  const u32 output_full = shared + OUTPUT_BARRIERS, output_empty = output_full + 8 * STREAMS;
  if (threadIdx.x == 0) {
    ring_K.init(4 * STREAMS);
    ring_Q.init(4 * STREAMS);
    ring_A.init(4 * STREAMS);
    ring_P.init(4 * STREAMS);
    for (int s = 0; s < STREAMS; s++) {
      barrier_init(output_full + 8 * s, 4);
      barrier_init(output_empty + 8 * s, 1);
    }
    barrier_init(shared + TAIL_BARRIER, 1);
    fence_barriers();
    fence_async();
  }
  __syncthreads();

  if (warp >= 4 * STREAMS) {
    if (warp == 4 * STREAMS) {
      // ---- load role
      u32 tail_phase = 0;
      for (int n = 0; n < chunks; n++) {
        const int token = sequence.start + n * C, rows = min(C, sequence.length - n * C);
        const i64 slot = (i64)(sequence.slot + n) * args.value_heads + value_head;
        const bool tail = rows < C;
        {  // K, Kt, V, rows
          ring_K.next();
          barrier_wait(ring_K.empty(), ring_K.phase ^ 1);
          const u32 full = tail ? shared + TAIL_BARRIER : ring_K.full();
          if (lane == 0) {
            barrier_expect(full, 41472);
            copy_bulk(ring_K.K().address, (const char*)args.ws_k_in + slot * 16384, 16384, full);
            copy_bulk(ring_K.Kt().address, (const char*)args.ws_k_out + slot * 16384, 16384, full);
            for (int s = 0; s < STREAMS; s++)
              load_box(ring_K.V(s).address, args.v_map, (split * STREAMS + s) * 64, value_head, token, sequence.batch, full);
            copy_bulk(ring_K.rows_address(), (const char*)args.ws_rows + slot * 512, 512, full);
          }
          if (tail) {
            barrier_wait(full, tail_phase);
            tail_phase ^= 1;
            for (int s = 0; s < STREAMS; s++) clear_rows(ring_K.V(s).address, 64, rows);
            fence_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(ring_K.full());
          }
        }
        {  // Q
          ring_Q.next();
          barrier_wait(ring_Q.empty(), ring_Q.phase ^ 1);
          const u32 full = ring_Q.full();
          if (lane == 0) {
            barrier_expect(full, 16384);
            copy_bulk(ring_Q.Q().address, (const char*)args.ws_q_in + slot * 16384, 16384, full);
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
        {  // P
          ring_P.next();
          barrier_wait(ring_P.empty(), ring_P.phase ^ 1);
          const u32 full = ring_P.full();
          if (lane == 0) {
            barrier_expect(full, 8192);
            copy_bulk(ring_P.P().address, (const char*)args.ws_p + slot * 8192, 8192, full);
          }
        }
      }
    } else if (warp <= 5 * STREAMS) {
      // ---- store role: one warp per column block
      const int stream = warp - 4 * STREAMS - 1;
      const int column = (split * STREAMS + stream) * 64;
      const u32 from = shared + OUTPUT + stream * 8192;
      for (int n = 0; n < chunks; n++) {
        const int token = sequence.start + n * C, rows = min(C, sequence.length - n * C);
        barrier_wait(output_full + 8 * stream, n & 1);
        if (rows == C) {
          if (lane == 0) {
            fence_async();
            store_box(args.o_map, column, value_head, token, sequence.batch, from);
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          }
        } else {
          // The box would overwrite the next sequence's rows.
          number* o = rows_of((number*)args.o, sequence.batch, token, value_head, args.o_stride_b, args.o_stride_t, args.o_stride_h) + column;
          for (int i = lane; i < rows * 8; i += 32) {
            u32 x[4];
            load_shared(x, from + tile_offset(C, i >> 3, (i & 7) * 8));
            *(uint4*)(o + (i >> 3) * args.o_stride_t + (i & 7) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(output_empty + 8 * stream);
      }
      if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    return;
  }

  // ---- chain role: one warpgroup per column block
  const int stream = 0;
  const int column = (split * STREAMS + stream) * 64;
  Block<128> S;
  Block<64> O;
  Operand<128> Sr;
  Operand<64> Vr;
  Operand<64> Or;
  Block<64> U;
  Block<64> V2;
  Operand<64> W;
  const u32 output = shared + OUTPUT + stream * 8192;
  u32 output_phase = 1;
  auto store_rows = [&](const Operand<C>& x, int) {
    barrier_wait(output_empty + 8 * stream, output_phase);
    output_phase ^= 1;
    store_operand(output, x);
    __syncwarp();
    barrier_arrive_if(output_full + 8 * stream, lane == 0);
  };
  if (!segment.first) {
    const float* from = (const float*)args.ws_carry + ((i64)(n_segment - 1) * args.value_heads + value_head) * CARRIED + column;
    for_each(S, [&](i64 k, i64 v, float& x) { x = from[k * (V + K) + v]; });
  } else if (args.initial_state) {
    const float* from = (const float*)args.initial_state + segment.n_sequence * args.initial_stride_n + value_head * args.initial_stride_h;
    for_each(S, [&](i64 k, i64 v, float& x) { x = from[k * args.initial_stride_k + (column + v) * args.initial_stride_v]; });
  } else {
    for_each(S, [&](int, int, float& x) { x = 0.f; });
  }

  // chunk n
  int n = 0;
  auto advance = [&] {
    // U = K S
    land(ring_K);
    product_rounded(U, ring_K.K(), Sr, S);
    // O = Q S
    land(ring_Q);
    product(O, ring_Q.Q(), Sr);
    // V, on the way to W
    load_operand(W, ring_K.V(stream));
    // W = V - U
    await<1>(U);
    subtract(W, U);
    // V' = A W
    land(ring_A);
    product(V2, ring_A.A(), W);
    // S = decay S
    scale_rows(S, ring_K.rows().decay());
    // V' rounded
    await<0>(O, V2);
    release(ring_Q);
    release(ring_A);
    to_operand(Vr, V2);
    // O += P V'
    land(ring_P);
    accumulate(O, ring_P.P(), Vr);
    // S += Ktᵀ V'
    accumulate(S, transposed(ring_K.Kt()), Vr);
    // O rounded
    await<1>(O);
    release(ring_P);
    to_operand(Or, O);
    // O to memory
    store_rows(Or, n);
    await<0>(S);
    release(ring_K);
    n++;
  };
  while (n + 2 < chunks) {
    // That is where they are; said here, it is a constant to the compiler.
    ring_K.slot = 2;
    ring_Q.slot = 2;
    ring_A.slot = 2;
    ring_P.slot = 2;
    advance();
    advance();
    advance();
  }
  while (n < chunks) {
    advance();
  }
  if (args.final_state) {
    int block = blockIdx.x / SPLITS;
    asm volatile("" : "+r"(block));  // as in for_each: what was known at the start is worked out again
    const Segment end = segment_at(args, block / args.value_heads);
    if (!end.last) return;
    float* to = (float*)args.final_state + end.n_sequence * args.final_stride_n + block % args.value_heads * args.final_stride_h;
    for_each(S, [&](i64 k, i64 v, float x) { to[k * args.final_stride_k + (column + v) * args.final_stride_v] = x; });
  }
}
