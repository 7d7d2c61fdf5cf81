// gated_delta_rule_scan_bf16_k128_v128 for gfx942: the chain over chunks.
// Rendered by qla-codegen. Build, with either command:
//   hipcc --genco --offload-arch=gfx942 -O3 -std=c++17 -o gated_delta_rule_scan_bf16_k128_v128.co gated_delta_rule_scan_bf16_k128_v128.hip
//   python -m ziglang clang -x hip --cuda-device-only -nogpulib -nogpuinc --offload-arch=gfx942 -mcode-object-version=5 -O3 -std=c++17 -S -emit-llvm -o gated_delta_rule_scan_bf16_k128_v128.ll gated_delta_rule_scan_bf16_k128_v128.hip && python -m ziglang clang --target=amdgcn-amd-amdhsa -mcpu=gfx942 -nogpulib -O3 -Xclang -disable-llvm-passes -c -x ir -o gated_delta_rule_scan_bf16_k128_v128.o gated_delta_rule_scan_bf16_k128_v128.ll && python -m ziglang ld.lld -shared -o gated_delta_rule_scan_bf16_k128_v128.co gated_delta_rule_scan_bf16_k128_v128.o

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
DEV int low_lane() { return thread_id() & 31; }   // lane of its half of a wave
DEV int upper() { return thread_id() >> 5 & 1; }  // which half
// Bits 2 and 3 of low_lane() change places: with rows or columns dealt out like that, those that a lane has of a block on
// its side are neighbours.
DEV int neighbour() { return (low_lane() & 19) + (low_lane() & 4) * 2 + (low_lane() & 8) / 2; }
DEV void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

typedef unsigned long long u64;
typedef float f32x2 __attribute__((ext_vector_type(2)));
// To the nearest bf16, ties away from zero, two at once: no sum reaches into the upper word. A NaN of ones would become
// a zero, so none is let in from memory.
DEV u32 pack(float lo, float hi) {
  const u64 sums = __builtin_bit_cast(u64, f32x2{lo, hi}) + 0x0000800000008000;
  return __builtin_amdgcn_perm((u32)(sums >> 32), (u32)sums, 0x07060302);
}
DEV float let_in(float x) { return x == x ? x : __builtin_nanf(""); }
DEV float from_bf16(u16 x) { return __builtin_bit_cast(float, (u32)x << 16); }
DEV float to_float(u16 x) { return from_bf16(x); }

// ---- arguments: one block; strides in elements
struct Args {
  void* k;
  void* q;
  void* v;
  void* ws_a;
  void* ws_p;
  void* ws_rows;
  void* cu_seqlens;
  void* initial_state;
  void* final_state;
  void* o;
  i64 k_stride_b;
  i64 k_stride_t;
  i64 k_stride_h;
  i64 q_stride_b;
  i64 q_stride_t;
  i64 q_stride_h;
  i64 v_stride_b;
  i64 v_stride_t;
  i64 v_stride_h;
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
  int heads;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
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
// The rows of a head, from a token on.
template <class T>
DEV T* rows_of(T* x, int batch, i64 token, int head, i64 stride_b, i64 stride_t, i64 stride_h) {
  return x + batch * stride_b + token * stride_t + head * stride_h;
}

// ---- tiles in LDS, and what a lane gives to the matrix cores and gets from them
typedef u32 Eight __attribute__((ext_vector_type(4), aligned(8)));  // numbers that lie side by side
// A lane's numbers of a matrix operand: neighbours along k, of one row (A) or column (B).
typedef u16 Four __attribute__((ext_vector_type(4)));
template <int ROWS, int COLUMNS>
struct SharedTile {
  static constexpr int PITCH = COLUMNS + 4;
  __attribute__((aligned(16))) number x[ROWS * PITCH];
  DEV number& at(int row, int column) { return x[row * PITCH + column]; }
  // Operand A of rows 32 block + (0 … 31) and columns 8 step + (0 … 7).
  DEV Four operand(int block, int step) const {
    return *(const Four*)&x[(32 * block + low_lane()) * PITCH + 8 * step + 4 * upper()];
  }
};
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef short Numbers __attribute__((ext_vector_type(4)));
// d[32, 32] + a[32, 8] b[8, 32].
DEV f32x16 multiply(Four a, Four b, f32x16 d) {
  return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Numbers, a), __builtin_bit_cast(Numbers, b), d, 0, 0, 0);
}
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
DEV Four round_four(f32x4 x) { return __builtin_bit_cast(Four, u32x2{pack(x[0], x[1]), pack(x[2], x[3])}); }
DEV f32x4 to_float(Four x) { return {to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}; }

// ---- tiles as operands of a product: `operand(block, step)`, and which of them are `needed`
template <int ROWS, int COLUMNS>
struct Tile {
  const SharedTile<ROWS, COLUMNS>& tile;
  static constexpr bool needed(int, int) { return true; }
  DEV Four operand(int block, int step) const { return tile.operand(block, step); }
};
// Zero above the diagonal.
template <int ROWS>
struct LowerTile {
  const SharedTile<ROWS, ROWS>& tile;
  static constexpr bool needed(int block, int step) { return 8 * step < 32 * (block + 1); }
  DEV Four operand(int block, int step) const { return tile.operand(block, step); }
};

// ---- values in registers: a lane's number i is x[i / 4][i % 4], of a block x[i / 16][i % 16]
DEV int row_of(int i) { return 8 * (i / 4) + 4 * upper() + i % 4; }
template <int ROWS> struct Block { f32x16 x[ROWS / 32]; };
template <int ROWS> struct Operand { Four x[ROWS / 8]; };
template <int ROWS> struct FloatRows { f32x4 x[ROWS / 8]; };
template <int BYTE> struct Shared { const unsigned char* rows; };
// A block on its side: a lane holds row 32 b + low_lane() and, for h = 0 and 1, columns 16 h + 8 upper() + (0 … 7).
template <int ROWS> struct TurnedBlock { f32x16 x[ROWS / 32]; };
template <int ROWS> struct TurnedOperand { Eight x[ROWS / 32][2]; };
template <int ROWS> struct TurnedRows { float x[ROWS / 32]; };

// ---- products: d[rows, 32] (+)= tile · x, on the matrix cores
//      Operands are read from LDS two double steps ahead, which the fences keep the compiler from undoing.
template <int N, int R, class T>
DEV void accumulate(Block<N>& d, T t, const Operand<R>& x) {
  constexpr int STEPS = R / 16, AHEAD = 2;
  Four a[STEPS][N / 32][2];
#pragma unroll
  for (int n = 0; n < STEPS + AHEAD; n++) {
    if (n < STEPS) {
#pragma unroll
      for (int b = 0; b < N / 32; b++)
        if (T::needed(b, 2 * n)) a[n][b][0] = t.operand(b, 2 * n), a[n][b][1] = t.operand(b, 2 * n + 1);
      __builtin_amdgcn_sched_barrier(0);
    }
    const int m = n - AHEAD;
    if (m < 0) continue;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < N / 32; b++)
        if (T::needed(b, 2 * m)) d.x[b] = multiply(a[m][b][i], x.x[2 * m + i], d.x[b]);
  }
}
template <int N, int R, class T>
DEV void accumulate(TurnedBlock<N>& d, T t, const Operand<R>& x) {
  constexpr int STEPS = R / 16, AHEAD = 2;
  Four a[STEPS][N / 32][2];
#pragma unroll
  for (int n = 0; n < STEPS + AHEAD; n++) {
    if (n < STEPS) {
#pragma unroll
      for (int b = 0; b < N / 32; b++)
        if (T::needed(b, 2 * n)) a[n][b][0] = t.operand(b, 2 * n), a[n][b][1] = t.operand(b, 2 * n + 1);
      __builtin_amdgcn_sched_barrier(0);
    }
    const int m = n - AHEAD;
    if (m < 0) continue;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < N / 32; b++)
        if (T::needed(b, 2 * m)) d.x[b] = multiply(x.x[2 * m + i], a[m][b][i], d.x[b]);
  }
}
template <template <int> class B, int N, int R, class T>
DEV void product(B<N>& d, T t, const Operand<R>& x) {
#pragma unroll
  for (int b = 0; b < N / 32; b++) d.x[b] = 0.f;
  accumulate(d, t, x);
}
template <int N> DEV f32x4 four(const Block<N>& b, int s) {
  const int i = 4 * (s % 4);
  return {b.x[s / 4][i], b.x[s / 4][i + 1], b.x[s / 4][i + 2], b.x[s / 4][i + 3]};
}
template <int N> DEV void to_operand(Operand<N>& x, const Block<N>& b) {
#pragma unroll
  for (int s = 0; s < N / 8; s++) x.x[s] = round_four(four(b, s));
}
template <int N> DEV void to_operand(TurnedOperand<N>& x, const TurnedBlock<N>& b) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) x.x[i / 8][i / 4 % 2][i % 4] = pack(b.x[i / 8][2 * i % 16], b.x[i / 8][2 * i % 16 + 1]);
}
// x = round(b) and d = tile · x.
template <int N, int R, class T>
DEV void product_rounded(Block<N>& d, T t, Operand<R>& x, const Block<R>& b) {
  to_operand(x, b);
  product(d, t, x);
}

// ---- rows as they come from memory, in an operand's place: a lane has row 32 b + low_lane(), and as numbers of step s
//      those that the identity gives to rows 8 s + (0 … 7) of a block on its side
template <int ROWS>
struct Landed {
  const Operand<ROWS>& x;
  static constexpr bool needed(int, int) { return true; }
  DEV Four operand(int block, int step) const { return x.x[4 * block + step]; }
};
DEV Operand<32> identity() {
  Operand<32> one;
#pragma unroll
  for (int i = 0; i < 16; i++) one.x[i / 4][i % 4] = row_of(i) == low_lane() ? 0x3F80 : 0;
  return one;
}
template <int N> DEV void load_operand(Operand<N>& x, const Operand<N>& v) { x = v; }

// ---- element by element
template <int BYTE, int N> DEV void load_rows(FloatRows<N>& r, Shared<BYTE> v) {
#pragma unroll
  for (int s = 0; s < N / 8; s++) r.x[s] = *(const f32x4*)(v.rows + BYTE + 4 * row_of(4 * s));
}
template <int BYTE, int N> DEV void load_rows(TurnedRows<N>& r, Shared<BYTE> v) {
#pragma unroll
  for (int b = 0; b < N / 32; b++) r.x[b] = *(const float*)(v.rows + BYTE + 4 * (32 * b + low_lane()));
}
template <int N> DEV void scale_four(Block<N>& b, int s, f32x4 r) {
#pragma unroll
  for (int e = 0; e < 4; e++) b.x[s / 4][4 * (s % 4) + e] *= r[e];
}
template <int N> DEV void scale_rows(Block<N>& b, const FloatRows<N>& r) {
#pragma unroll
  for (int s = 0; s < N / 8; s++) scale_four(b, s, r.x[s]);
}
template <int N> DEV void scale_rows(TurnedBlock<N>& b, const TurnedRows<N>& r) {
#pragma unroll
  for (int i = 0; i < N / 32; i++) b.x[i] *= r.x[i];
}
// x, as landed, plus rows of b.
template <int N> DEV void add_scaled(Operand<N>& x, const FloatRows<N>& r, Block<N> b) {
  scale_rows(b, r);
  accumulate(b, Landed<N>{x}, identity());
  to_operand(x, b);
}
template <int N> DEV void scaled_operand(Operand<N>& x, const FloatRows<N>& r, const Operand<N>& y) {
#pragma unroll
  for (int s = 0; s < N / 8; s++) x.x[s] = round_four(r.x[s] * to_float(y.x[s]));
}
template <int BYTE, int N> DEV void scale(Block<N>& b, Shared<BYTE> v) {
  const float factor = *(const float*)(v.rows + BYTE);
#pragma unroll
  for (int i = 0; i < N / 32; i++) b.x[i] *= factor;
}
// Number (row, column) of a block becomes f(row, column).
template <int N, class F> DEV void fill(Block<N>& b, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) b.x[i / 16][i % 16] = f(row_of(i), neighbour());
}
// Calls f(row, column, number) for what this lane holds of a block.
template <int N, class F> DEV void for_each(const Block<N>& b, F f) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) f(row_of(i), neighbour(), b.x[i / 16][i % 16]);
}

// ---- a chunk's tiles in LDS, and on their way there
constexpr int RECORD = 784;  // bytes of the row vectors of a (chunk, value head)
struct Tiles {
  union {  // first one, then the other
    SharedTile<64, 128> K;
    SharedTile<128, 64> turned_K;
  };
  SharedTile<64, 128> Q;
  SharedTile<64, 64> A;
  SharedTile<64, 64> P;
  __attribute__((aligned(16))) unsigned char rows[RECORD];
};
static_assert(sizeof(Tiles) == 52496);
DEV Eight eight_at(const void* from, u32 offset) { return *(const Eight*)((const char*)from + offset); }
// From column `column` of a row of a tensor. Rows at and after `rows`, which is where the sequence ends, are never read;
// in their place the first is, which zeros in A and P keep from all results.
DEV Eight eight_of(const number* from, int row, int column, i64 stride_t, int rows) {
  return eight_at(from, (row < rows ? row * (u32)stride_t + column : column) * (u32)sizeof(number));
}
// A tile's numbers dealt out to the threads, eight at a time.
// Of a lower triangle of 64 rows, the first 32 have only their left half.
template <int ROWS, int COLUMNS, bool LOWER = false>
struct Pieces {
  static constexpr int HALVES = LOWER ? 128 : 0, ALL = ROWS * COLUMNS / 8 - HALVES, COUNT = (ALL + THREADS - 1) / THREADS;
  Eight x[COUNT];
  static DEV int piece(int n) { return (thread_id() + n * THREADS) % ALL; }
  static DEV int row(int n) { return piece(n) < HALVES ? piece(n) / 4 : (piece(n) + HALVES) / (COLUMNS / 8); }
  static DEV int column(int n) { return piece(n) % (piece(n) < HALVES ? 4 : COLUMNS / 8) * 8; }
  // Whether the piece is this thread's alone: where there are too few, others hold copies, for the sake of equal loads.
  static DEV bool mine(int n) { return ALL % THREADS == 0 || thread_id() + n * THREADS < ALL; }
  // From the workspace, where tiles lie row by row.
  DEV void fetch(const void* from) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) x[n] = eight_at(from, (row(n) * COLUMNS + column(n)) * sizeof(number));
  }
  // From a tensor of which `rows` rows may be read; see `eight_of`.
  DEV void fetch(const number* from, i64 stride_t, int rows) {
    constexpr int STEP = THREADS / (COLUMNS / 8);
#pragma unroll
    for (int n = 0; n < COUNT; n++) x[n] = eight_of(from, n * STEP + row(0), column(0), stride_t, rows);
  }
  DEV void put(SharedTile<ROWS, COLUMNS>& to) const {
#pragma unroll
    for (int n = 0; n < COUNT; n++) if (mine(n)) *(Eight*)&to.at(row(n), column(n)) = x[n];
  }
};
// A tile that is used by columns, in LDS as columns too: each thread has runs of 4 rows that follow one another.
template <int ROWS, int COLUMNS>
struct TurnedPieces {
  static constexpr int COUNT = ROWS * COLUMNS / 8 / THREADS, RUN = 4, STEP = THREADS / (COLUMNS / 8);
  static_assert(COUNT % RUN == 0);
  Eight x[COUNT];
  // Row n is the thread's first one and what is the same for all threads.
  static DEV int row() { return thread_id() / (COLUMNS / 8) * RUN; }
  static DEV int further(int n) { return n / RUN * STEP * RUN + n % RUN; }
  static DEV int column() { return thread_id() % (COLUMNS / 8) * 8; }
  // From a tensor of which `rows` rows may be read; see `eight_of`.
  DEV void fetch(const number* from, i64 stride_t, int rows) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) x[n] = eight_of(from, further(n) + row(), column(), stride_t, rows);
  }
  DEV void put(SharedTile<ROWS, COLUMNS>& to) const {
#pragma unroll
    for (int n = 0; n < COUNT; n++) *(Eight*)&to.at(further(n) + row(), column()) = x[n];
  }
  // Number e of rows n and n + 1.
  DEV u32 pair(int n, int e) const {
    return __builtin_amdgcn_perm(x[n + 1][e / 2], x[n][e / 2], e % 2 ? 0x07060302 : 0x05040100);
  }
  DEV void put_turned(SharedTile<COLUMNS, ROWS>& to) const {
#pragma unroll
    for (int n = 0; n < COUNT; n += RUN)
#pragma unroll
      for (int e = 0; e < 8; e++)
        *(u32x2*)&to.at(column() + e, further(n) + row()) = u32x2{pair(n, e), pair(n + 2, e)};
  }
};
// This wave's columns of a tensor's rows: no other wave needs them, so they do not pass through LDS.
template <int ROWS>
struct ColumnPieces {
  Eight x[ROWS / 32][2];
  DEV void fetch(const number* from, i64 stride_t, int rows) {
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
      x[i / 2][i % 2] = eight_of(from, i / 2 * 32 + low_lane(), i % 2 * 16 + 8 * upper(), stride_t, rows);
  }
  DEV Operand<ROWS> landed() const {
    Operand<ROWS> to;
#pragma unroll
    for (int s = 0; s < ROWS / 8; s++)
      to.x[s] = __builtin_bit_cast(Four, u32x2{x[s / 4][s / 2 % 2][s % 2 * 2], x[s / 4][s / 2 % 2][s % 2 * 2 + 1]});
    return to;
  }
};

// ---- what a wave works on, and the chunk that is on its way to it
struct Work {
  Sequence sequence;
  int value_head, column;
  DEV int chunks() const { return (sequence.length + C - 1) / C; }
  DEV int rows(int chunk) const { return sequence.length - chunk * C < C ? sequence.length - chunk * C : C; }
};

// K, Q, A, P, rows: `chunk` is the one on its way.
struct Ring_K {
  const Args& args;
  const Work& work;
  Tiles& tiles;
  int chunk = 0;
  TurnedPieces<64, 128> next_K, held_K;
  Pieces<64, 128> next_Q;
  Pieces<64, 64, true> next_A;
  Pieces<64, 64, true> next_P;
  Eight next_rows;
  struct Rows {
    const unsigned char* rows;
    DEV Shared<0> minus_in() const { return {rows}; }
    DEV Shared<256> left() const { return {rows}; }
    DEV Shared<512> out() const { return {rows}; }
    DEV Shared<768> decay() const { return {rows}; }
  };
  DEV Rows rows() const { return {tiles.rows}; }
  DEV int rows_at() const { return 16 * (thread_id() < RECORD / 16 ? thread_id() : RECORD / 16 - 1); }
  // Its rows; for its columns, what put them there comes along.
  struct Turning : Tile<64, 128> { const Ring_K& ring; };
  DEV Turning K() const { return { {tiles.K}, *this}; }
  DEV Tile<64, 128> Q() const { return {tiles.Q}; }
  DEV LowerTile<64> A() const { return {tiles.A}; }
  DEV LowerTile<64> P() const { return {tiles.P}; }

  DEV void fetch() {
    const int batch = work.sequence.batch, start = work.sequence.start, rows = work.rows(chunk);
    const int head = work.value_head * args.heads / args.value_heads;
    const i64 place = (i64)(work.sequence.slot + chunk) * args.value_heads + work.value_head;
    next_K.fetch(rows_of((const number*)args.k, batch, start, head, args.k_stride_b, args.k_stride_t, args.k_stride_h) + chunk * (C * args.k_stride_t),
                 args.k_stride_t, rows);
    next_Q.fetch(rows_of((const number*)args.q, batch, start, head, args.q_stride_b, args.q_stride_t, args.q_stride_h) + chunk * (C * args.q_stride_t),
                 args.q_stride_t, rows);
    next_A.fetch((const number*)args.ws_a + place * 4096);
    next_P.fetch((const number*)args.ws_p + place * 4096);
    next_rows = eight_at((const char*)args.ws_rows + place * RECORD, rows_at());
  }
  DEV void put() {
    next_K.put(tiles.K);
    held_K = next_K;
    next_Q.put(tiles.Q);
    next_A.put(tiles.A);
    next_P.put(tiles.P);
    if (thread_id() < RECORD / 16) *(Eight*)(tiles.rows + rows_at()) = next_rows;
  }
};

// V: `chunk` is the one on its way.
struct Ring_V {
  const Args& args;
  const Work& work;
  int chunk = 0;
  ColumnPieces<64> next_V;
  DEV Operand<64> V(int) const { return next_V.landed(); }

  DEV void fetch() {
    const int batch = work.sequence.batch, start = work.sequence.start, rows = work.rows(chunk);
    next_V.fetch(rows_of((const number*)args.v, batch, start, work.value_head, args.v_stride_b, args.v_stride_t, args.v_stride_h) + work.column +
                     chunk * (C * args.v_stride_t),
                 args.v_stride_t, rows);
  }
};
// The chunk's tiles go to LDS, and the next chunk's set out.
template <class R> DEV void land(R& ring) {
  ring.put();
  sync();
  ring.chunk++;
  if (ring.chunk < ring.work.chunks()) ring.fetch();
}
// All waves have read the tiles.
template <class R> DEV void release(R&) { sync(); }
// This wave's columns stay where they are until they have been used.
DEV void land(Ring_V&) {}
DEV void release(Ring_V& ring) {
  ring.chunk++;
  if (ring.chunk < ring.work.chunks()) ring.fetch();
}
// When all waves have read the rows, the columns take their place.
template <class R> DEV Tile<128, 64> transposed(R t) {
  sync();
  t.ring.held_K.put_turned(t.ring.tiles.turned_K);
  sync();
  return {t.ring.tiles.turned_K};
}

extern "C" __global__ WORKGROUP void gated_delta_rule_scan_bf16_k128_v128(const Args args) {
  __shared__ Tiles tiles;

  // ---- what this wave works on
  const int stream = wave();
  const int value_head = block_id() % args.value_heads, n_sequence = block_id() / args.value_heads;
  const int column = stream * 32;
  const Work work{sequence_at(args, n_sequence), value_head, column};
  const int chunks = work.chunks();

  // ---- the chain
  Block<128> S;
  TurnedBlock<64> O;
  Operand<128> Sr;
  Operand<64> Vr;
  TurnedOperand<64> Or;
  Block<64> U;
  Block<64> V2;
  Operand<64> W;
  Operand<64> X;
  FloatRows<64> left;
  FloatRows<64> minus_in;
  TurnedRows<64> out;

  auto store_rows = [&](const TurnedOperand<C>& x, int chunk) {
    number* o = rows_of((number*)args.o, work.sequence.batch, work.sequence.start, value_head, args.o_stride_b, args.o_stride_t, args.o_stride_h) + column +
                chunk * (C * args.o_stride_t);
    const int rows = work.rows(chunk);
#pragma unroll
    for (int b = 0; b < C / 32; b++) {
      const int row = 32 * b + low_lane();
      char* at = (char*)o + (row * (u32)args.o_stride_t + 8 * upper()) * (u32)sizeof(number);
      if (row < rows) {
        *(Eight*)at = x.x[b][0];
        *(Eight*)(at + 16 * sizeof(number)) = x.x[b][1];
      }
    }
  };
  if (args.initial_state) {
    const float* from = (const float*)args.initial_state + n_sequence * args.initial_stride_n +
                        value_head * args.initial_stride_h + column * args.initial_stride_v;
    fill(S, [&](int k, int v) { return let_in(from[k * args.initial_stride_k + v * args.initial_stride_v]); });
  } else {
    fill(S, [](int, int) { return 0.f; });
  }

  if (chunks > 0) {
    Ring_K ring_K{args, work, tiles};
    ring_K.fetch();
    Ring_V ring_V{args, work};
    ring_V.fetch();
    for (int n = 0; n < chunks; n++) {
      // U = K S
      land(ring_K);
      product_rounded(U, ring_K.K(), Sr, S);
      // V, on the way to W
      land(ring_V);
      load_operand(W, ring_V.V(stream));
      release(ring_V);
      load_rows(minus_in, ring_K.rows().minus_in());
      // W = V - in U
      add_scaled(W, minus_in, U);
      // V' = A W
      product(V2, ring_K.A(), W);
      // O = Q S
      product(O, ring_K.Q(), Sr);
      // S = decay S
      scale(S, ring_K.rows().decay());
      // V' rounded
      to_operand(Vr, V2);
      // row factors of V' and O
      load_rows(left, ring_K.rows().left());
      load_rows(out, ring_K.rows().out());
      // O = out O + P V'
      scale_rows(O, out);
      accumulate(O, ring_K.P(), Vr);
      // O rounded
      to_operand(Or, O);
      // O to memory
      store_rows(Or, n);
      // S += Kᵀ (left V')
      scaled_operand(X, left, Vr);
      accumulate(S, transposed(ring_K.K()), X);
      release(ring_K);
    }
  }
  if (args.final_state) {
    float* to = (float*)args.final_state + n_sequence * args.final_stride_n + value_head * args.final_stride_h +
                column * args.final_stride_v;
    for_each(S, [&](int k, int v, float x) { to[k * args.final_stride_k + v * args.final_stride_v] = x; });
  }
}
